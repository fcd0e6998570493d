"""Moves end when all processes have answered, whatever the order."""

import json
import queue
import threading
import time

import pytest

from dsv4_jax.serving.device import answers
from dsv4_jax.serving.device.answers import Answer, Answers
from helpers.serving import until


class Hosts:
    """Three processes in one; how often the others were listened to."""

    def __init__(self, number=0):
        self.number, self.count, self.asked, self.sent = number, 3, 0, []
        self.said = {1: queue.Queue(), 2: queue.Queue()}
        self.numbers = iter(range(10**6))

    def next_number(self):
        return next(self.numbers)

    def answer(self, message):
        self.sent.append(message)

    def hear_answer(self, other):
        self.asked += 1
        return self.said[other].get()

    def say(self, other, move, damaged=(), wrong=""):
        self.said[other].put(json.dumps([move, list(damaged), wrong]).encode())


@pytest.fixture
def hosts():
    return Hosts()


@pytest.fixture
def moves(hosts):
    made = Answers(hosts)
    yield made
    made.close()
    for other in hosts.said.values():
        other.put(None)


def test_a_move_has_ended_when_all_have_answered_and_not_before(hosts, moves):
    first, future = moves.expect(list)
    second, other = moves.expect(len)
    moves.report(first, [(4, 1)], "")
    hosts.say(2, second)  # which ended sooner there
    hosts.say(2, first, wrong="no memory")
    hosts.say(1, second)
    moves.report(second, [], "")
    assert other.result(10) == 3
    time.sleep(0.05)
    assert not future.done()
    hosts.say(1, first, [(4, 0)])
    assert future.result(10) == [Answer(0, [(4, 1)], ""), Answer(1, [(4, 0)], ""),
                                 Answer(2, [], "no memory")]  # fmt: skip


def test_while_nothing_moves_nobody_is_listened_to(hosts, moves):
    number, future = moves.expect(len)
    moves.report(number, [], "")
    for other in hosts.said:
        hosts.say(other, number)
    future.result(10)
    asked = hosts.asked
    time.sleep(0.05)
    assert hosts.asked == asked == 2


def test_what_is_made_of_the_answers_may_raise(hosts, moves):
    def conclude(found):
        raise ValueError([one.wrong for one in found])

    number, future = moves.expect(conclude)
    moves.report(number, [], "a")
    hosts.say(1, number, wrong="b")
    hosts.say(2, number, wrong="c")
    assert str(future.exception(10)) == "['a', 'b', 'c']"


def test_an_answer_about_a_move_that_nobody_waits_for_changes_nothing(hosts, moves):
    gone, future = moves.expect(len)
    kept, other = moves.expect(len)
    moves.forget([gone])
    for number in (gone, kept):
        moves.report(number, [], "")
        hosts.say(1, number)
        hosts.say(2, number)
    assert other.result(10) == 3
    assert not future.done()


def test_who_begins_more_than_may_be_under_way_waits(hosts, moves, monkeypatch):
    monkeypatch.setattr(answers, "MOST_UNANSWERED", 2)
    first, _ = moves.expect(len)
    moves.expect(len)
    begun = []
    third = threading.Thread(target=lambda: begun.append(moves.expect(len)))
    third.start()
    time.sleep(0.05)
    assert begun == []
    moves.report(first, [], "")
    hosts.say(1, first)
    hosts.say(2, first)
    until(lambda: begun)
    third.join()


def test_another_process_sends_what_it_has_to_say(hosts):
    other = Hosts(number=1)
    Answers(other).report(7, [(3, 2)], "gone")
    assert [json.loads(one) for one in other.sent] == [[7, [[3, 2]], "gone"]]
