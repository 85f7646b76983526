"""What a run does when it is told to pause, to go on, to keep a checkpoint or to stop."""

from gyre.program.orders import OrderDesk, OrderHooks, is_orderly
from gyre.store.orders import Order


def make_desk() -> tuple[OrderDesk, list[str]]:
    done: list[str] = []
    hooks = OrderHooks(
        hold=lambda: done.append("hold"),
        release=lambda: done.append("release"),
        take_checkpoint=lambda: done.append("checkpoint"),
        end=done.append,
    )
    return OrderDesk(hooks), done


def test_pause_and_resume_hold_dispatch_once_each() -> None:
    desk, done = make_desk()
    desk.open_dispatch()
    for order in (Order.PAUSE, Order.PAUSE, Order.RESUME, Order.RESUME):
        desk.take(order, is_training=True)
    assert done == ["release", "hold", "release"]


def test_a_pause_before_the_start_holds_when_the_run_is_ready_and_resuming_does_not_begin_early() -> None:
    desk, done = make_desk()
    desk.take(Order.PAUSE, is_training=False)
    desk.take(Order.RESUME, is_training=False)
    assert done == []
    desk.take(Order.PAUSE, is_training=False)
    desk.open_dispatch()
    assert done == [] and desk.notes() == ("dispatch is paused",)
    desk.take(Order.RESUME, is_training=True)
    assert done == ["release"]


def test_a_stop_waits_for_a_step_with_a_checkpoint() -> None:
    desk, done = make_desk()
    desk.open_dispatch()
    desk.take(Order.STOP, is_training=True)
    desk.step_trained(4, "")
    assert done == ["release", "checkpoint"] and "stops after" in desk.notes()[0]
    desk.step_trained(5, "step-000005")
    assert done[-1] == "stopped as ordered after step 5"
    assert is_orderly(done[-1])


def test_a_stop_ends_a_pause_and_resume_takes_the_stop_back() -> None:
    desk, done = make_desk()
    desk.open_dispatch()
    desk.take(Order.PAUSE, is_training=True)
    desk.take(Order.STOP, is_training=True)
    desk.take(Order.RESUME, is_training=True)
    desk.step_trained(1, "step-000001")
    assert done == ["release", "hold", "checkpoint", "release"]


def test_where_no_step_is_trained_a_stop_is_at_once() -> None:
    desk, done = make_desk()
    desk.take(Order.STOP, is_training=False)
    assert done == ["stopped as ordered"] and is_orderly(done[0])


def test_an_asked_checkpoint_is_noted_until_it_is_there() -> None:
    desk, done = make_desk()
    desk.take(Order.CHECKPOINT, is_training=True)
    assert done == ["checkpoint"] and desk.notes() == ("a checkpoint is taken with this step",)
    desk.step_trained(1, "step-000001")
    assert desk.notes() == ()


def test_errors_and_signals_are_no_orderly_end() -> None:
    assert is_orderly("finished") and not is_orderly("stopped by SIGTERM") and not is_orderly("rank 1 died")
