"""What agents send, by who sends it: the path, the body and what of it the model is asked without.

Bodies of LangChain and LiteLLM were recorded from langchain-openai 1.7.4, langchain-anthropic
1.7.10, langchain-deepseek 1.1.1 and litellm 1.110.2, and shortened. Those of Claude Code, Codex and
opencode are written in the shape that is public of them.
"""

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FLAG = {
    "type": "object", "properties": {"ok": {"title": "Ok", "type": "boolean"}}, "required": ["ok"],
    "title": "A", "additionalProperties": False,
}  # fmt: skip
CACHED = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
FUNCTION = {"name": "get_weather", "description": "d", "parameters": CITY}
CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
HISTORY = [
    {"role": "system", "content": [{"type": "text", "text": "s", **CACHED}]},
    {"role": "user", "content": "q", "name": "Bob"},
    {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "c", "content": "rain"},
]

CLAUDE = {
    "system": [
        {"type": "text", "text": "x-client: cli"},
        {"type": "text", "text": "You help.", **HOUR},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "r", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "t", "name": "Read", "input": {"path": "a", "limit": None},
             "caller": {"type": "direct"}, "cache_control": None},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "is_error": False, **CACHED,
             "content": [{"type": "text", "text": "file", **CACHED}]},
        ]},
    ],
    "tools": [
        {"name": "Read", "description": "d", "eager_input_streaming": True, **CACHED,
         "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema",
                          "type": "object", "properties": {"path": {"type": "string"}},
                          "required": ["path"], "additionalProperties": False}},
        {"name": "mcp__a__b", "description": "d", "defer_loading": True, "type": "custom",
         "input_schema": {"type": "object", "properties": {}}},
    ],
    "metadata": {"user_id": "user_1"},
    "max_tokens": 32000,
    "temperature": 1,
    "stream": True,
}  # fmt: skip

CODEX = {
    "instructions": "You help.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}',
         "call_id": "a", "id": None},
        {"type": "function_call_output", "call_id": "a", "output": "files"},
        {"type": "custom_tool_call", "status": "completed", "call_id": "b", "name": "apply_patch",
         "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "Done"},
        {"type": "web_search_call", "status": "completed",
         "action": {"type": "search", "query": "q"}},
        {"type": "message", "role": "assistant", "phase": "commentary",
         "content": [{"type": "output_text", "text": "It is done."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "d", "strict": False,
         "parameters": {"type": "object", "properties": {
             "command": {"type": "array", "items": {"type": "string"}}}}},
        {"type": "custom", "name": "apply_patch", "description": "d",
         "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}},
        {"type": "custom", "name": "exec", "description": "d",
         "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": {}},
        {"type": "namespace", "name": "mcp__maps", "description": "d", "tools": [
            {"type": "function", "name": "find", "description": "d", "strict": False,
             "defer_loading": True, "parameters": CITY}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "0198",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
}  # fmt: skip
_CODEX_WITHOUT = [
    "input[] (web_search_call)", "input[].phase", "service_tier", "text.verbosity",
    "tools[] (custom)", "tools[] (image_generation)", "tools[] (local_shell)",
    "tools[] (tool_search)", "tools[] (web_search)", "tools[].format (grammar)",
    "tools[].tools[].defer_loading",
]  # fmt: skip

REQUESTS = {
    "Claude Code, a budget of thinking": (MESSAGES, CLAUDE | {
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }, ["messages[].content[] (redacted_thinking)", "tools[].defer_loading"]),
    "Claude Code, adaptive": (MESSAGES, CLAUDE | {
        "thinking": {"type": "adaptive", "budget_tokens": 0}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{
            "type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]},
        "diagnostics": {"previous_message_id": None}, "speed": "fast",
    }, ["diagnostics", "messages[].content[] (redacted_thinking)", "speed",
        "tools[].defer_loading"]),
    "Claude Code, a title": (MESSAGES, {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "system": [{"type": "text", "text": "Name it."}], "tools": [], "max_tokens": 32000,
        "metadata": {"user_id": "user_1"}, "temperature": 1, "stream": True,
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": FLAG}},
    }, None),
    "Claude Code, a probe": (MESSAGES, {
        "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}],
        "metadata": {"user_id": "user_1"},
    }, None),
    "Claude Code, a count": (COUNT, {
        "messages": CLAUDE["messages"], "tools": CLAUDE["tools"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }, ["messages[].content[] (redacted_thinking)", "tools[].defer_loading"]),
    "Codex": (RESPONSES, CODEX, _CODEX_WITHOUT),
    "Codex, a schema": (RESPONSES, {
        "instructions": "i", "input": CODEX["input"][1:2], "tools": [], "tool_choice": "auto",
        "parallel_tool_calls": False, "reasoning": None, "store": False, "stream": True,
        "include": [], "text": {"format": {"type": "json_schema", "strict": True, "schema": FLAG,
                                           "name": "codex_output_schema"}},
    }, None),
    "opencode, chat": (CHAT, {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]},
            {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "rain"},
        ],
        "max_tokens": 32000, "temperature": 0.55, "top_p": 1, "reasoning_effort": "medium",
        "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto",
        "stream": True, "stream_options": {"include_usage": True},
        "prompt_cache_key": "ses_1", "chat_template_kwargs": {"enable_thinking": True},
    }, None),
    "opencode, responses": (RESPONSES, {
        "input": [
            {"role": "developer", "content": "s"},
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ],
        "max_output_tokens": 32000, "store": False, "stream": True, "prompt_cache_key": "ses_1",
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "medium"},
        "tools": [{"type": "function", **FUNCTION, "strict": None}], "tool_choice": "auto",
    }, None),
    "langchain-openai": (CHAT, {
        "messages": HISTORY, "stream": False,
        "tools": [{"type": "function", "function": FUNCTION}],
    }, ["messages[].name"]),
    "langchain-openai, strict": (CHAT, {
        "messages": HISTORY[1:2], "parallel_tool_calls": False, "tool_choice": "required",
        "tools": [{"type": "function", "function": FUNCTION | {
            "strict": True, "parameters": CITY | {"additionalProperties": False}}}],
    }, ["messages[].name"]),
    "langchain-openai, a class": (CHAT, {
        "messages": HISTORY[:1], "stream": False,
        "response_format": {"type": "json_schema", "json_schema": {
            "schema": FLAG, "name": "A", "strict": True}},
    }, None),
    "langchain-openai, responses": (RESPONSES, {
        "stream": False, "include": ["reasoning.encrypted_content"], "store": False,
        "input": [
            {"content": "s", "role": "system", "type": "message"},
            {"content": "q", "role": "user", "type": "message"},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "t", "annotations": []}]},
            {"type": "function_call", "name": "get_weather", "arguments": "{}", "call_id": "c"},
            {"type": "function_call_output", "output": "rain", "call_id": "c"},
        ],
        "max_output_tokens": 100, "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
    }, ["text.verbosity", "tools[] (web_search)"]),
    "langchain-anthropic": (MESSAGES, {
        "max_tokens": 2000, "system": "s", "thinking": {"type": "enabled", "budget_tokens": 1024},
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "r", "signature": "s"},
                {"type": "text", "text": "t"},
                {"type": "tool_use", "name": "get_weather", "input": {"city": "a"}, "id": "c"},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "content": "rain",
                                          "tool_use_id": "c", "is_error": False}]},
        ],
        "tools": [{"name": "get_weather", "input_schema": CITY, "description": "weather"}],
    }, None),
    "langchain-anthropic, a class": (MESSAGES, {
        "max_tokens": 4096, "messages": [{"role": "user", "content": "hi"}],
        "output_config": {"format": {"type": "json_schema", "schema": FLAG}},
    }, None),
    "langchain-deepseek, a class": (CHAT, {
        "messages": HISTORY[:2], "parallel_tool_calls": False, "stream": False,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "tools": [{"type": "function", "function": FUNCTION}],
    }, ["messages[].name"]),
    "litellm, openai": (CHAT, {
        "messages": HISTORY, "max_tokens": 2000, "reasoning_effort": "low", "stream": True,
        "tools": [{"type": "function", "function": FUNCTION, **CACHED}],
        "metadata": {"a": "b"}, "user": "u", "store": True,
    }, ["messages[].name", "store"]),
    "litellm, deepseek": (CHAT, {
        "messages": HISTORY, "stream": True, "max_tokens": 2000, "thinking": {"type": "enabled"},
        "reasoning_effort": "low", "tools": [{"type": "function", "function": FUNCTION}],
    }, ["messages[].name"]),
    "litellm, anthropic": (MESSAGES, {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c", "name": "get_weather", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "rain"}]},
        ],
        "max_tokens": 128000, "metadata": {"user_id": "u"}, "stream": True, **CACHED,
        "tools": [{"name": "get_weather", "input_schema": CITY, "type": "custom",
                   "description": "d"}],
        "system": [{"type": "text", "text": "s", **CACHED}],
    }, None),
    "litellm, responses": (RESPONSES, {
        "input": [
            {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "s"}]},
            {"type": "message", "role": "user",
             "content": [{"type": "input_text", "text": "q", **CACHED}]},
            {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c",
             "output": [{"type": "input_text", "text": "rain"}]},
        ],
        "max_output_tokens": 2000, "reasoning": {"effort": "low"}, "metadata": {"a": "b"},
        "tools": [{**FUNCTION, "strict": None, "type": "function", **CACHED},
                  {"type": "web_search_preview"}],
    }, ["tools[] (web_search_preview)"]),
}  # fmt: skip
"""By sender; None where nothing is left out."""
