"""Random requests: make_requests.py MODELS COUNT SEED, a JSON object a line: {model, path, body}.

Most are requests that a client might send; each has a few fields of odd values. The body is text, in
the spellings that JSON has, so that digits, escapes and repeated keys reach both sides.
"""

import json
import random
import sys

R = random.Random()

WORDS = [
    "Hi", "What is 2+2?", "  two  spaces ", "", " ", "\n\n", "line\nbreak\r\n", "tab\tx", '"q" \'s\'',
    "Grüße", "日本語", "e\u0301 n\u0303", "👍🏽", "👩‍👩‍👧", "𝔘𝔫𝔦", "\u00a0nbsp\u00a0", "\u001c\u001d\u001e\u001f",
    "\u0085\u2028\u2029", "\u200b\u200d\ufeff", "\u0000", "\u007f\u0080\u009f", "ﬁ ß İ ǆ", "ΑΣ",
    "<|im_end|>", "<|im_start|>system\n", "<|eot_id|>", "<s>", "</s>", "<think>a</think>\n\nb", "<think>",
    "</think>", "<tool_call>\n{}\n</tool_call>", "{{ x }}", "{% x %}", "{}", "[]", '{"a": 1}', "null", "true",
    "1e5", "0", "-0.0", "%s %d", "\\n \\u0041", "a" * 60, "/no_think", "x-anthropic-billing-header: 1\nS",
    "CONTINUE_FINAL_MESSAGE_TAG ", "ـالعربية", "हिन्दी", "\u202eabc\u202c", "1,234.5", "if x:\n    y = 1\n",
]  # fmt: skip
NUMBERS = [
    "0", "-0", "1", "-1", "7", "1.0", "-0.0", "1.50", "1e5", "1E+2", "1e16", "1e22", "1e-5", "1e-7", "3e-05",
    "0.1", "123456789.123456789", "9007199254740993", "9223372036854775807", "9223372036854775808",
    "-9223372036854775809", "18446744073709551616", "1" + "0" * 38, "1" + "0" * 45, "1e400", "NaN", "Infinity",
    "-Infinity", "5e-324", "1.7976931348623157e308", "2.5", "100000000000000000000.0",
]  # fmt: skip
KEYS = [
    "a", "b", "name", "type", "text", "content", "items", "keys", "get", "é", "", "1", "arguments", "id", "role",
    "function", "properties", "description", "A", "_x", "a b", "\u00a0", "update", "0",
]  # fmt: skip


def maybe(chance):
    return R.random() < chance


def word():
    return "".join(R.choice(WORDS) for _ in range(R.choice([1, 1, 1, 1, 2, 3])))


class Raw(str):
    """A value in the text that it has in the body."""


class Pairs(list):
    """An object's members; a key may be there twice."""


def number():
    return Raw(R.choice(NUMBERS))


def value(depth=2):
    kind = R.randrange(8 if depth else 5)
    if kind == 0:
        return None
    if kind == 1:
        return maybe(0.5)
    if kind == 2:
        return number()
    if kind in (3, 4):
        return word()
    if kind == 5:
        return [value(depth - 1) for _ in range(R.randrange(4))]
    return Pairs((R.choice(KEYS), value(depth - 1)) for _ in range(R.randrange(4)))


def spelled(text):
    """A string of JSON, with any of its characters escaped."""
    if maybe(0.004):
        return json.dumps(text + "\ud83d")
    if maybe(0.03):
        return '"' + "".join(f"\\u{ord(c):04X}" if ord(c) < 0xD800 else c for c in text) + '"'
    out = json.dumps(text, ensure_ascii=maybe(0.5))
    return out.replace("/", "\\/") if maybe(0.05) else out


def dumps(item, gap=None):
    gap = R.choice(["", " ", " ", "\n\t"]) if gap is None else gap
    if isinstance(item, Raw):
        return str(item)
    if isinstance(item, str):
        return spelled(item)
    if isinstance(item, (dict, Pairs)):
        pairs = item.items() if isinstance(item, dict) else item
        pairs = [f"{spelled(key)}:{gap}{dumps(own, gap)}" for key, own in pairs]
        return "{" + ("," + gap).join(pairs) + "}"
    if isinstance(item, (list, tuple)):
        return "[" + ("," + gap).join(dumps(own, gap) for own in item) + "]"
    return json.dumps(item)


def arguments():
    """What a call is given: an object as text as a rule."""
    if maybe(0.75):
        return dumps(Pairs((R.choice(KEYS), value()) for _ in range(R.randrange(4))))
    return R.choice(
        [
            Raw("{}"), Raw('""'), Raw("null"), "[]", "null", "5", "not json", "{'a': 1}", '{"a": 1', " {} ",
            '{"a": 1} x', "NaN", '"text"', "[1, 2]", "{\"a\": NaN}", "\ufeff{}", "true", value(), Pairs([("a", 1)]),
        ]
    )  # fmt: skip


def schema():
    return R.choice(
        [
            {"type": "object"},
            {"type": "object", "properties": {"a": {"type": "integer", "description": word()}}, "required": ["a"]},
            {
                "type": "object",
                "properties": {
                    "b": {"type": ["string", "null"], "enum": [word(), None, number()]},
                    "c": {"type": "array", "items": {"type": "string"}, "default": value(1)},
                },
                "additionalProperties": False,
            },
            {"type": "object", "properties": Pairs((R.choice(KEYS), {"type": "string"}) for _ in range(3))},
            {},
            value(),
        ]
    )


def function():
    own = {"name": R.choice(["f", "get_weather", "g.h", "é"])}
    if maybe(0.75):
        own["description"] = word() if maybe(0.9) else None
    if maybe(0.85):
        own["parameters"] = schema()
    if maybe(0.15):
        own["strict"] = R.choice([True, False, None])
    if maybe(0.08):
        own[R.choice(["response", "return", "x", "examples"])] = value()
    return own


def tool():
    own = {"type": "function", "function": function()}
    if maybe(0.1):
        own[R.choice(["x", "cache_control", "strict", "defer_loading", "id"])] = value()
    if maybe(0.04):
        own.pop("type")
    if maybe(0.02):
        own["type"] = "retrieval"
    return own


def part(kind="text"):
    own = {"type": kind, "text": word()}
    if maybe(0.06):
        own[R.choice(["cache_control", "x", "annotations"])] = value(1)
    return own


def content(kind="text"):
    chance = R.random()
    if chance < 0.55:
        return word()
    if chance < 0.85:
        return [part(kind) for _ in range(R.choice([1, 1, 2, 3]))]
    return R.choice(
        [
            None, [], "", [word()], [word(), part(kind)], [{"type": "refusal", "refusal": word()}],
            [{"type": "thinking", "thinking": word()}], [{"text": word()}], [{"type": kind}], value(),
            [{"type": "input_text", "text": word()}], [{"type": "output_text", "text": word()}],
        ]
    )  # fmt: skip


def call(at):
    own = {"id": f"c{at}", "type": "function", "function": {"name": R.choice(["f", "g"]), "arguments": arguments()}}
    if maybe(0.05):
        own["function"].pop("arguments")
    if maybe(0.05):
        own["index"] = at
    if maybe(0.04):
        own.pop(R.choice(["id", "type"]))
    return own


def message(role):
    own = {"role": role}
    if not (role == "assistant" and maybe(0.1)):
        own["content"] = content()
    if role == "assistant":
        if maybe(0.3):
            own["tool_calls"] = R.choice([[], None]) if maybe(0.1) else [call(at) for at in range(R.choice([1, 1, 2]))]
        for name in ["reasoning", "reasoning_content"]:
            if maybe(0.15):
                own[name] = word() if maybe(0.85) else value(1)
        if maybe(0.04):
            own[R.choice(["refusal", "audio", "function_call", "annotations"])] = R.choice([None, word(), value(1)])
    if role == "tool":
        if maybe(0.9):
            own["tool_call_id"] = "c0"
    if maybe(0.07):
        own["name"] = word() if maybe(0.8) else value(1)
    if maybe(0.06):
        own[R.choice(["x", "cache_control", "thinking", "tools", "task"])] = value(1)
    return own


def conversation():
    own = []
    if maybe(0.4):
        own.append(message(R.choice(["system", "system", "developer"])))
    for at in range(R.choice([1, 1, 2, 2, 3, 4, 5])):
        own.append(message("user" if at % 2 == 0 else "assistant"))
        if own[-1].get("tool_calls") and maybe(0.8):
            own.append(message("tool"))
    if maybe(0.12):
        role = R.choice(["system", "developer", "tool", "assistant", "user", "critic", "function"])
        own.insert(R.randrange(len(own) + 1), message(role))
    return own


def kwargs():
    own = {}
    for _ in range(R.choice([1, 1, 2, 3])):
        name = R.choice(
            ["enable_thinking", "thinking", "reasoning_effort", "preserve_thinking", "builtin_tools", "tools",
             "tools_in_user_message", "date_string", "custom_tools", "xml_tools", "extra", "strict", "bos_token",
             "documents", "add_generation_prompt", "continue_final_message", "messages", "controls",
             "add_vision_id", "clear_thinking", "chat_template", "tokenize", "padding"]
        )  # fmt: skip
        own[name] = R.choice([True, False, True, False, None, "auto", word(), value()])
    return own


def odd():
    return R.choice([None, True, False, "true", "0", "yes", "x", 1, 0, Raw("1.0"), number(), value(1)])


def settings(body, limits):
    """Fields that any API has, right or odd."""
    if maybe(0.3):
        body[limits] = R.choice([5, 5, 5, None, Raw("5.0"), "5", odd()])
    for name, usual in [
        ("stream", [True, False]), ("temperature", [0, 1, Raw("0.7")]), ("top_p", [1, Raw("0.9")]), ("seed", [1]),
        ("user", ["u"]), ("cache_salt", ["salt", "é", ""]), ("metadata", [{}, {"a": "b"}]),
    ]:  # fmt: skip
        if maybe(0.04):
            body[name] = R.choice(usual) if maybe(0.7) else odd()


def choice(body, names):
    if maybe(0.2):
        pick = [*names, {"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}, odd()]
        body["tool_choice"] = R.choice(pick)


def chat():
    body = {"messages": conversation()}
    if maybe(0.35):
        body["tools"] = R.choice([None, [], value(1)]) if maybe(0.08) else [tool() for _ in range(R.choice([1, 1, 2]))]
    choice(body, ["auto", "none", "required"])
    continued = maybe(0.12)
    if continued:
        body["continue_final_message"] = True
        if maybe(0.9):
            body["add_generation_prompt"] = False
            if maybe(0.8):
                body["messages"].append(message("assistant"))
    elif maybe(0.15):
        body["add_generation_prompt"] = R.choice([True, False, False, odd()])
    if maybe(0.25):
        body["chat_template_kwargs"] = kwargs() if maybe(0.95) else odd()
    if maybe(0.1):
        body["reasoning_effort"] = R.choice(["none", "minimal", "low", "medium", "high", "max", None, odd()])
    if maybe(0.06):
        body["documents"] = [{"title": word(), "text": word()}] if maybe(0.7) else odd()
    if maybe(0.08):
        body["truncate_prompt_tokens"] = R.choice([1, 5, 20, -1, 0, 100000, Raw("8.0"), "7", odd()])
        if maybe(0.5):
            body["truncation_side"] = R.choice(["left", "right", None, "x"])
    if maybe(0.08):
        body["add_special_tokens"] = R.choice([True, False, odd()])
    if maybe(0.03):
        name = R.choice(["echo", "include_reasoning", "parallel_tool_calls", "response_format", "stop", "n", "x",
                         "logprobs", "top_logprobs", "stream_options", "prompt_logprobs", "min_tokens"])  # fmt: skip
        body[name] = odd()
    settings(body, R.choice(["max_tokens", "max_completion_tokens"]))
    return body


def messages():
    body = {"max_tokens": 5, "messages": []}
    if maybe(0.5):
        body["system"] = content()
    for at in range(R.choice([1, 1, 2, 3, 3, 5])):
        if at % 2 == 0:
            parts = content()
            if at and isinstance(parts, list) and maybe(0.5):
                result = {"type": "tool_result", "tool_use_id": "t1", "content": content()}
                if maybe(0.3):
                    result["is_error"] = maybe(0.5)
                parts = [result, *parts]
            body["messages"].append({"role": "user", "content": parts})
        else:
            parts = [part() for _ in range(R.choice([0, 1, 1]))]
            if maybe(0.3):
                parts.insert(0, {"type": "thinking", "thinking": word(), "signature": "s"})
            if maybe(0.1):
                parts.insert(0, {"type": "redacted_thinking", "data": "d"})
            for _ in range(R.choice([0, 0, 1, 2])):
                given = Pairs((R.choice(KEYS), value()) for _ in range(R.randrange(3)))
                parts.append({"type": "tool_use", "id": "t1", "name": "f", "input": given})
            body["messages"].append({"role": "assistant", "content": parts if maybe(0.7) else content()})
    if maybe(0.12):
        late = {"role": R.choice(["system", "user", "assistant", "tool"]), "content": content()}
        body["messages"].insert(R.randrange(len(body["messages"]) + 1), late)
    if maybe(0.4):
        body["tools"] = []
        for _ in range(R.choice([0, 1, 1, 2])):
            own = function()
            own["input_schema"] = own.pop("parameters", {"type": "object"})
            body["tools"].append(own)
        if maybe(0.4):
            body["tool_choice"] = R.choice(
                [{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "f"}, odd()]
            )
    if maybe(0.25):
        body["thinking"] = R.choice(
            [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}, odd()]
        )
    if maybe(0.05):
        body[R.choice(["max_tokens", "output_config", "stop_sequences", "top_k"])] = odd()
    if maybe(0.05):
        body["chat_template_kwargs"] = kwargs()
    settings(body, "max_tokens")
    return body


def response_item(at):
    kind = R.random()
    if kind < 0.4:
        own = {"role": R.choice(["user", "user", "user", "system", "developer"]), "content": content("input_text")}
        return {"type": "message", **own} if maybe(0.5) else own
    if kind < 0.55:
        own = {"role": "assistant", "content": content("output_text")}
        return {"type": "message", **own} if maybe(0.6) else own
    if kind < 0.62:
        said = [{"type": "output_text", "text": word(), "annotations": []}]
        return {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": said}
    if kind < 0.78:
        return {"type": "function_call", "call_id": f"c{at}", "name": "f", "arguments": arguments()}
    if kind < 0.9:
        return {"type": "function_call_output", "call_id": "c0", "output": content("input_text")}
    if kind < 0.98:
        own = {"type": "reasoning", "id": "r", "summary": []}
        if maybe(0.5):
            own["summary"] = [{"type": "summary_text", "text": word()}]
        if maybe(0.6):
            own["content"] = [{"type": "reasoning_text", "text": word()}]
        return own
    return value()


def responses():
    body = {"input": word() if maybe(0.2) else [response_item(at) for at in range(R.choice([1, 2, 3, 4]))]}
    if maybe(0.35):
        body["instructions"] = word() if maybe(0.9) else odd()
    if maybe(0.35):
        body["tools"] = [{"type": "function", **function()} for _ in range(R.choice([0, 1, 1, 2]))]
        choice(body, ["auto", "none", "required"])
    if maybe(0.15):
        body["reasoning"] = {"effort": R.choice(["low", "medium", "high", "none"])} if maybe(0.8) else odd()
    if maybe(0.08):
        name = R.choice(["text", "truncation", "store", "background", "previous_response_id", "parallel_tool_calls"])
        body[name] = odd()
    if maybe(0.06):
        body["chat_template_kwargs"] = kwargs()
    settings(body, "max_output_tokens")
    return body


def completions():
    body = {"prompt": word()}
    if maybe(0.25):
        body["prompt"] = R.choice(
            [[5, 6, 7], [[5, 6], [7]], [word()], [word(), "x"], [], [[]], None, [1, True], ["a", 1], odd()]
        )
    if maybe(0.2):
        body["truncate_prompt_tokens"] = R.choice([1, 3, 20, -1, 0, -2, odd()])
        if maybe(0.5):
            body["truncation_side"] = R.choice(["left", "right", None])
    if maybe(0.2):
        body["add_special_tokens"] = R.choice([True, False, odd()])
    if maybe(0.1):
        body[R.choice(["echo", "suffix", "n", "best_of", "logprobs", "stream_options", "use_beam_search"])] = odd()
    settings(body, "max_tokens")
    return body


def main(models, count, seed):
    R.seed(int(seed))
    with open(models, encoding="utf-8") as file:
        names = [model["name"] for model in json.load(file)]
    apis = [("/v1/chat/completions", chat), ("/v1/messages", messages), ("/v1/responses", responses),
            ("/v1/completions", completions)]  # fmt: skip
    for _ in range(int(count)):
        path, make = R.choices(apis, [70, 12, 12, 6])[0]
        name = R.choice(names)
        body = {"model": name, **make()}
        print(json.dumps({"model": name, "path": path, "body": dumps(body)}))


main(*sys.argv[1:])
