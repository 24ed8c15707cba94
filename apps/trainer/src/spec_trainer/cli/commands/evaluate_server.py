"""Run ``evaluate --server``: measure running servers and return the document with the figures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from spec_core.errors import ConfigError
from spec_core.wording import shown
from spec_processes.sockets import server_address
from spec_trainer.configuration.chat import PromptConfig
from spec_trainer.configuration.engine_options import read_engine_options
from spec_trainer.measure.evaluation.request import EvaluationRequest
from spec_trainer.measure.server.document import summarise_servers
from spec_trainer.measure.server.load import ask_at_once, measure_load
from spec_trainer.measure.server.openai_server import OpenAiServer
from spec_trainer.measure.server.questions import Question, read_questions

log = logging.getLogger(__name__)

_ANSWERED_AT_ONCE = 8
"""Number of concurrent requests while answers to earlier turns are generated, which are not timed."""


def evaluate_servers(request: EvaluationRequest, words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the document of ``evaluate --server --json``.

    ``words``: command-line options ``data.chat_template_kwargs.NAME=VALUE`` and ``data.media_root=FOLDER``.
    """
    chat = _chat(request, words)
    for url in filter(None, (request.server, request.baseline_server)):
        server_address(url)  # check both addresses before a request is sent
    options: dict[str, Any] = {
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature or 0.0,
        "seed": request.seed,
        **({} if request.stop_at_eos else {"ignore_eos": True}),
    }
    with ExitStack() as opened:
        server = opened.enter_context(OpenAiServer(request.server, request.timeout_s))
        baseline = None
        if request.baseline_server:
            baseline = opened.enter_context(OpenAiServer(request.baseline_server, request.timeout_s))

        def answer(questions: Sequence[Question]) -> list[str]:
            log.info("answering prompts (%d), for the questions that follow", len(questions))
            greedy = {**options, "temperature": 0.0}
            answers = ask_at_once(baseline or server, questions, greedy, _ANSWERED_AT_ONCE)
            return [answer.text for answer in answers]

        questions = read_questions(request, chat, answer)
        plain, drafted = {}, {}
        for size in request.concurrencies or (1,):
            if baseline is not None:
                plain[size] = measure_load(baseline, questions, options, size)
            drafted[size] = measure_load(server, questions, options, size)
    return {
        "server": server.url,
        "engine": server.engine_name,
        "model": server.model,
        "baseline_server": baseline and baseline.url,
        "baseline_engine": baseline and baseline.engine_name,
        "baseline_model": baseline and baseline.model,
        "seed": request.seed,
        "prompts": len(questions),
        "temperature": options["temperature"],
        "max_new_tokens": request.max_new_tokens,
        "chat_template_kwargs": chat.chat_template_kwargs,
        **summarise_servers(
            drafted,
            plain or None,
            [question.right for question in questions],
            is_greedy=not options["temperature"],
        ),
    }


def _chat(request: EvaluationRequest, words: Sequence[str]) -> PromptConfig:
    """Return the settings for rendering prompts from the arguments ``words``.

    Raise ConfigError if ``words`` has any other option.
    """
    for word in words:
        if not word.startswith(("data.chat_template_kwargs", "data.media_root=")):
            raise ConfigError(
                f"{shown(word)} is not for --server, which runs as it was started; expected "
                "data.chat_template_kwargs.NAME=VALUE, data.media_root=FOLDER or nothing"
            )
    return read_engine_options(request.engine, request.backend, words).config.data
