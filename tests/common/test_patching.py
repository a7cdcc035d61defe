"""Attributes replaced for one thread."""

import threading
import types

import pytest

from torch_shard._common.patching import patched


class Base:
    level = 1

    def who(self):
        return "base"

    @property
    def size(self):
        return 3

    def __enter__(self):
        return "entered"

    def __exit__(self, *error):
        pass


class Derived(Base):
    pass


def elsewhere(fn):
    """What `fn` returns in another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    return found[0]


def louder(original):
    return lambda self: original(self).upper()


def test_a_method_is_replaced_for_this_thread_only():
    original = vars(Base)["who"]
    with patched(Base, "who", louder):
        assert (Base().who(), Derived().who()) == ("BASE", "BASE")
        assert elsewhere(Base().who) == "BASE"  # bound here
        assert elsewhere(lambda: Base().who()) == "base"
        assert elsewhere(lambda: Base.who) is original
    assert vars(Base)["who"] is original


def test_an_inherited_attribute_is_inherited_again():
    with patched(Derived, "who", louder):
        assert (Base().who(), Derived().who()) == ("base", "BASE")
        with patched(Base, "who", lambda original: lambda self: "other"):
            assert (Base().who(), Derived().who()) == ("other", "BASE")
            assert elsewhere(lambda: (Base().who(), Derived().who())) == ("base", "base")
    assert "who" not in vars(Derived)


def test_a_class_whose_base_is_replaced_already():
    with patched(Base, "who", louder), patched(Derived, "who", lambda original: lambda self: original(self) + "!"):
        assert (Base().who(), Derived().who()) == ("BASE", "BASE!")
        assert elsewhere(lambda: Derived().who()) == "base"
    assert "who" not in vars(Derived)


def test_properties_values_and_special_methods():
    changed = Base()
    changed.level = 7
    with (
        patched(Base, "size", lambda original: property(lambda self: original.__get__(self) + 1)),
        patched(Base, "level", lambda original: original + 1),
        patched(Base, "__enter__", lambda original: lambda self: "other"),
        Base() as found,
    ):
        assert (Base().size, Base().level, Base.level, changed.level, found) == (4, 2, 2, 7, "other")
        assert elsewhere(lambda: (Base().size, Base().level, changed.level)) == (3, 1, 7)
        with pytest.raises(AttributeError):
            Base().size = 5
    assert (Base().size, vars(Base)["level"], Base().__enter__()) == (3, 1, "entered")


def test_a_function_of_a_module():
    module = types.ModuleType("module")
    module.double = original = lambda x: 2 * x
    with patched(module, "double", lambda original: lambda x: original(x) + 1):
        assert module.double(2) == 5
        with patched(module, "double", lambda original: lambda x: -original(x)):
            assert module.double(2) == -5
        assert elsewhere(lambda: module.double(2)) == 4
    assert module.double is original


def test_the_last_thread_to_leave_puts_the_original_back_whatever_the_order():
    original = vars(Base)["who"]
    first, second = threading.Event(), threading.Event()
    found = []

    def other():
        with patched(Base, "who", lambda original: lambda self: original(self) + " of the other"):
            first.set()
            second.wait(10)
            found.append(Base().who())

    thread = threading.Thread(target=other)
    with patched(Base, "who", louder):
        thread.start()
        assert first.wait(10)
        assert Base().who() == "BASE"
    assert Base().who() == "base"  # this thread has left, the other has not
    second.set()
    thread.join()
    assert found == ["base of the other"]
    assert vars(Base)["who"] is original


def test_an_error_within_and_one_of_the_wrapper_leave_the_original():
    original = vars(Base)["who"]
    with pytest.raises(ZeroDivisionError), patched(Base, "who", louder):
        raise ZeroDivisionError
    with patched(Base, "who", louder):
        with pytest.raises(ZeroDivisionError), patched(Base, "who", lambda _: 1 / 0):
            pass
        assert Base().who() == "BASE"
    assert vars(Base)["who"] is original


def test_what_somebody_else_assigns_meanwhile_stays():
    class Own(Base):
        level = 2

    with patched(Own, "level", lambda _: 3):
        Own.level = 4
    assert Own.level == 4
