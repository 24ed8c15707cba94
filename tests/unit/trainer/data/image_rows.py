"""Images, and rows with them."""

import base64
from io import BytesIO

import numpy as np
from PIL import Image

ANSWER = {"role": "assistant", "content": "A cat."}


def pixels(width=20, height=12, mode="RGB", seed=0):
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng((width, height, seed)).integers(
        0, 256, (height, width, channels), dtype=np.uint8
    )
    return Image.frombytes(mode, (width, height), values.tobytes())


def encoded(image=None, kind="PNG", **options) -> bytes:
    file = BytesIO()
    (image or pixels()).save(file, kind, **options)
    return file.getvalue()


def uri(data=None, media="image/png"):
    return f"data:{media};base64,{base64.b64encode(data or encoded()).decode()}"


def asked(*parts, answer=ANSWER):
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return plain(content, answer)


def plain(question, answer=ANSWER):
    return {"messages": [{"role": "user", "content": question}, answer]}


def shown(reference):
    return {"type": "image", "image": reference}
