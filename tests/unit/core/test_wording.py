from spec_core.wording import counted, one_line, printable, shown


def test_a_count_has_its_noun_in_singular_and_plural():
    assert [counted(number, "token") for number in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
    assert [counted(number, "process", "processes") for number in (1, 2)] == ["1 process", "2 processes"]


def test_a_value_is_cut_in_the_middle():
    assert shown("abc") == "'abc'"
    cut = shown("a" * 500 + "z" * 500)
    assert len(cut) == 200
    assert cut.startswith("'aaa")
    assert cut.endswith("zzz'")


def test_nothing_is_left_that_a_terminal_obeys():
    assert printable("a\x1b[31m\x07\u202e\udcff\n日本 ü") == "a\\x1b[31m\\x07\\u202e\\udcff\n日本 ü"


def test_a_message_is_one_line_and_keeps_its_end():
    line = one_line("what\nhappened " + "\x1b" * 5_000 + " do this")
    assert line.startswith("what happened \\x1b")
    assert line.endswith(" do this")
    assert len(line) == 1_950
