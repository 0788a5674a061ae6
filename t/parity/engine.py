"""Token ids of the engine's own request models and renderer: engine.py MODELS CASES ANSWERS.

MODELS: a JSON list of {name, dir, template: path or null}. CASES: a JSON object a line, {model, path,
body}, with the request body as text. ANSWERS: the same with `ids`, or with `error` where the engine
refuses the request.
"""

import asyncio
import json
import os
import sys

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="CRITICAL",
    VLLM_CPU_KVCACHE_SPACE="1",
)

from vllm import AsyncEngineArgs  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # noqa: E402
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # noqa: E402
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: E402
from vllm.entrypoints.serve.engine.protocol import ErrorResponse  # noqa: E402
from vllm.renderers import renderer_from_config  # noqa: E402
from vllm.renderers.inputs.preprocess import extract_prompt_components  # noqa: E402
from vllm.renderers.online_renderer import OnlineRenderer  # noqa: E402


class Refused(Exception):
    pass


class Engine:
    """What a server holds of one model, without the model."""

    tokenizers = {}

    def __init__(self, folder, template):
        if folder not in self.tokenizers:
            config = AsyncEngineArgs(model=folder, dtype="float32").create_model_config()
            self.tokenizers[folder] = config, renderer_from_config(VllmConfig(model_config=config))
        self.config, renderer = self.tokenizers[folder]
        if template is not None:
            with open(template, encoding="utf-8", newline="") as file:
                template = file.read()
        self.renderer = OnlineRenderer(
            model_config=self.config,
            renderer=renderer,
            request_logger=None,
            chat_template=template,
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="hermes",
        )
        # Its constructor wants an engine; of that /v1/messages uses nothing before it is asked.
        self.messages = object.__new__(AnthropicServingMessages)
        self.messages.online_renderer = self.renderer
        self.messages.model_config = self.config
        self.messages._disabled_thinking_effort = None
        self.merges_system = AnthropicServingMessages._should_merge_inline_system(self.renderer)

    async def chat(self, request):
        result = self.checked(await self.renderer.render_chat(request))
        return result[1][0]

    async def from_messages(self, body):
        request = AnthropicMessagesRequest.model_validate(body)
        effort = "none"
        if request.thinking is not None and request.thinking.type == "disabled":
            effort = await self.messages._get_disabled_thinking_effort()
        return await self.chat(
            AnthropicServingMessages.to_chat_completion_request(
                request,
                merge_inline_system=self.merges_system,
                disabled_thinking_effort=effort,
            )
        )

    async def from_responses(self, body):
        request = ResponsesRequest.model_validate(body)
        if request.previous_response_id is not None:
            raise Refused("the response before is not stored")
        return self.checked(await self.renderer.render_responses(request)).engine_input

    async def from_completions(self, body):
        request = CompletionRequest.model_validate(body)
        return self.checked(await self.renderer.render_completion(request))[0]

    async def ids(self, path, body):
        body = json.loads(body)
        if path == "/v1/chat/completions":
            prompt = await self.chat(ChatCompletionRequest.model_validate(body))
        elif path == "/v1/messages":
            prompt = await self.from_messages(body)
        elif path == "/v1/responses":
            prompt = await self.from_responses(body)
        else:
            prompt = await self.from_completions(body)
        return list(extract_prompt_components(self.config, prompt).token_ids)

    @staticmethod
    def checked(result):
        if isinstance(result, ErrorResponse):
            raise Refused(result.error.message)
        return result


async def main(models, cases, answers):
    with open(models, encoding="utf-8") as file:
        models = {model["name"]: model for model in json.load(file)}
    engines = {}
    with open(cases, encoding="utf-8") as file, open(answers, "w", encoding="utf-8") as out:
        for line in file:
            case = json.loads(line)
            model = models[case["model"]]
            if model["name"] not in engines:
                engines[model["name"]] = Engine(model["dir"], model["template"])
            try:
                case["ids"] = await engines[model["name"]].ids(case["path"], case["body"])
            except Exception as error:
                said = f"{type(error).__name__}: {error}"[:300]
                case["error"] = said.encode(errors="backslashreplace").decode()
            print(json.dumps(case), file=out)


asyncio.run(main(*sys.argv[1:]))
