"""Turns of threads are short while any update is received, and as before afterwards."""

import sys
import threading

from spec_kit.weight_sync.switch_interval import short_switch_interval


def test_turns_are_as_before_when_the_last_block_ends():
    usual_s = sys.getswitchinterval()
    inside, go_on = threading.Event(), threading.Event()

    def other_update():
        with short_switch_interval():
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=other_update)
    with short_switch_interval():
        thread.start()
        assert inside.wait(10)
    assert sys.getswitchinterval() < usual_s / 10
    go_on.set()
    thread.join(10)
    assert sys.getswitchinterval() == usual_s
