import pytest

from jaxspec.chat_template import MAX_TEMPLATE, ChatTemplate
from jaxspec.errors import UserError
from tests.tokenizers_made import CHATML, HELLO


def render(template: str, messages=HELLO, **variables) -> str:
    return ChatTemplate(template, "model").render(messages, **variables)


def test_a_chat_renders_as_its_template_says():
    turn = "<|im_start|>user\nHello<|im_end|>\n"
    opened = render(CHATML, add_generation_prompt=True)
    assert opened == turn + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == turn


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{i}}"
         "{% endfor %}", "01"),
        ("{% for m in messages %}{{ loop.last }}{% endfor %}", "True"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools %}x{% else %}y{% endif %}{{ 'a' ~ 1 ~ none }}", "ya1None"),
        ("a {%- generation -%} b {%- endgeneration %}", "ab"),
        ("{{ 2 * 5 }}{{ 'ab' * 2 }}{{ '%s!' % 'c' }}", "10ababc!"),
        ("{% set n = namespace(x=0) %}{% for i in [2, 3] %}{% set n.x = n.x + i %}"
         "{% endfor %}{{ n.x }}", "5"),
        ("{{ ['a', 'b'] | join(', ') }}{{ '-'.join(['c', 'd']) }}", "a, bc-d"),
        ("{{ ' x '.strip() }}{{ 'a b'.split(' ')[1] }}{{ 'x' | indent(2) }}", "xbx"),
        ("{{ messages[1:] | length }}{{ messages | map(attribute='role') | first }}",
         "0user"),
    ],
)  # fmt: skip
def test_what_templates_use_is_there(template, expected):
    assert render(template) == expected


@pytest.mark.parametrize(
    "messages",
    [
        "Hello",
        [],
        None,
        ["Hello"],
        [{"role": "user"}],
        [{"content": "Hello"}],
        [{"role": "user", "content": None}],
        [{"role": 1, "content": "Hello"}],
        {"role": "user", "content": "Hello"},
    ],
)
def test_malformed_messages_are_refused(messages):
    with pytest.raises(UserError, match="expected a list of"):
        render(CHATML, messages)


def test_all_malformed_messages_are_named_at_once():
    with pytest.raises(UserError, match=r"message 0: 'role'.*message 2: 'content'"):
        render(CHATML, [{"content": ""}, *HELLO, "x"])


def test_a_refusal_by_the_template_is_shown():
    with pytest.raises(UserError, match=r"model: .*roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ ''.__class__ }}", "access to '__class__'"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to '__class__'"),
        ("{{ messages['__class__'] }}", "access to '__class__'"),
        ("{{ messages | attr('__class__') }}", "access to '__class__'"),
        ("{{ '{0.__class__}'.format(messages) }}", "access to '__class__'"),
        ("{{ raise_exception.__globals__ }}", "access to '__globals__'"),
        ("{{ range.__init__ }}", "access to '__init__'"),
        ("{{ messages.append(1) }}", "access to 'append'"),
        ("{% set x = cycler.__init__.__globals__.os %}", "access to '__init__'"),
        ("{% include 'tokenizer.json' %}", "no loader"),
    ],
)
def test_escapes_from_the_sandbox_are_refused(template, fault):
    with pytest.raises(UserError, match=fault):
        render(template)


STEPS = "loop steps and calls"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for i in range(100001) %}{% endfor %}", "Range too big"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
         STEPS),
        ("{% set t = 'x' * 99999 %}{% for i in t %}{% for j in t %}{% endfor %}"
         "{% endfor %}", STEPS),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
         "{% endmacro %}{{ f(60) }}", STEPS),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(9999) %}{{ 'x' * 999 }}{% endfor %}", "a text of more"),
        ("{{ 'x' * 999999999 }}", "too large"),
        ("{{ 9 ** 9 ** 9 }}", "a power"),
        ("x" * (MAX_TEMPLATE + 1), "over 65536"),
    ],
)  # fmt: skip
def test_work_and_sizes_are_bounded(template, fault):
    with pytest.raises(UserError, match=fault):
        render(template)


def test_each_rendering_has_all_the_steps():
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}", "model")
    assert [template.render(HELLO) for _ in range(5)] == [""] * 5


def test_the_bounds_leave_room_for_a_long_chat():
    turns = [{"role": "user", "content": "x" * 1000}] * 2000
    assert len(render(CHATML, turns)) > 2_000_000


def test_a_template_that_does_not_parse_is_refused_on_one_line():
    with pytest.raises(UserError, match="does not compile") as caught:
        render("{% if %}")
    assert "\n" not in str(caught.value)
