"""``llama-server`` by the package xllamacpp, which has the server but not its command line.

python llama_server.py -m TARGET.gguf [-md DRAFT.gguf --spec-type KIND --spec-draft-n-max K] [--metrics] --port P
"""

import argparse
import os
import threading

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import xllamacpp

F32 = xllamacpp.ggml_type.GGML_TYPE_F32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="target", required=True)
    parser.add_argument("-md", dest="draft")
    parser.add_argument("--spec-type")
    parser.add_argument("--spec-draft-n-max", type=int)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--port", type=int, required=True)
    words = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.endpoint_metrics = words.target, words.port, words.metrics
    params.n_ctx, params.n_parallel, params.cache_prompt = 1024, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = F32
    if words.draft:
        kind = f"COMMON_SPECULATIVE_TYPE_{words.spec_type.upper().replace('-', '_')}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max = words.draft, words.spec_draft_n_max
        draft.cache_type_k = draft.cache_type_v = F32
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
