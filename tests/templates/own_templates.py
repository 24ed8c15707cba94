"""Chat templates in the manner of real ones, one for each way in which an answer and its context can differ."""

from ..chat_templates import CHATML, READS_PARTS, THINKING

NO_PROMPT = """\
{{- bos_token }}{% for tool in tools or [] %}[AVAILABLE_TOOLS]{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}
    {%- for call in m.tool_calls or [] %}
      {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
    {%- endfor %}{{ eos_token }}
  {%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
  {%- elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]
  {%- else %}[INST]{{ m.content }}[/INST]{% endif %}
{%- endfor %}"""
"""Answers follow the question directly, as Mistral's."""
LATE_SYSTEM = """\
{{- bos_token }}{% set ns = namespace(system='') %}
{%- for m in messages %}
  {%- if m.role == 'system' %}{% set ns.system = m.content + '\\n' %}
  {%- elif m.role == 'assistant' %}{{ m.content + eos_token }}
  {%- else %}[INST]{{ ns.system if loop.last else '' }}{{ m.content }}[/INST]{% endif %}
{%- endfor %}"""
"""The system prompt stands in the last message alone, and only while that is the user's."""
NESTED = """\
{%- for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif -%}
<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% if m.tool_calls %}
  {%- for call in m.tool_calls %}
    {{- '<|call>' + call.function.name + call.function.arguments | tojson + '<call|>' }}{% endfor %}
  {%- set ns = namespace(open=true) %}
  {%- for t in messages[loop.index:] %}
    {%- if t.role != 'tool' %}{% set ns.open = false %}
    {%- elif ns.open %}{{ '<|response>' + t.content + '<response|>' }}{% endif %}
  {%- endfor %}
{%- endif %}{{ m.content }}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}"""
"""The results of a call stand in the turn that called, before its text."""
HARMONY = """\
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- if m.reasoning_content and (loop.last or m.tool_calls) %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{% endif %}
    {%- for call in m.tool_calls or [] %}
      {{- '<|start|>assistant to=' + call.function.name + '<|channel|>commentary<|message|>' }}
      {{- call.function.arguments | tojson + '<|call|>' }}{% endfor %}
    {%- if not m.tool_calls %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
      {{- '<|return|>' if loop.last else '<|end|>' }}{% endif %}
  {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""Each answer chooses its channel, and ends otherwise in the history."""
NEXT_HEADER = """\
{%- for m in messages %}
  {%- if m.role == 'assistant' %}{{ '<|assistant|>\\n<think>' }}
    {%- if loop.last %}{{ m.reasoning_content or '' }}{% endif %}{{ '</think>\\n' + m.content }}
    {%- for call in m.tool_calls or [] %}
      {{- '\\n<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}{% endfor %}
  {%- else %}{{ ('<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>') + '\\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n<think>' }}{% endif %}"""
"""No end token: an answer ends with the first token of the next header. The prompt opens a thought."""
IN_THE_LOOP = """\
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}
  {%- if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}
  {%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
{%- endfor %}"""
"""The generation prompt belongs to the last message, so none is there without messages. Calls are not written."""

OWN_TEMPLATES = {
    "chatml": CHATML, "thinking": THINKING, "reads parts": READS_PARTS, "no prompt": NO_PROMPT,
    "late system": LATE_SYSTEM, "nested": NESTED, "harmony": HARMONY, "next header": NEXT_HEADER,
    "in the loop": IN_THE_LOOP,
}  # fmt: skip
