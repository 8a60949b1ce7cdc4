"""Template: names of steps, read back exactly or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.errors import StateError
from ckptfs.manager.run_setup import Template

# What people put around the step, with everything that a regular expression would take for itself.
AROUND = st.text(alphabet="abcXYZ-_ .*+?()[]^$|#é", max_size=8).filter(
    lambda text: not text.startswith(".")
)
WIDTHS = st.sampled_from(["{N}", "{N:01}", "{N:08}", "{N:012}"])


@pytest.mark.parametrize(
    ("text", "step", "name"),
    [
        ("step_{N}", 100, "step_100"),
        ("step-{N}", 0, "step-0"),
        ("checkpoint-{N}", 12000, "checkpoint-12000"),
        ("global_step_{N}", 7, "global_step_7"),
        ("{N}", 42, "42"),
        ("{N:08}", 42, "00000042"),
        ("ep{N:03}.ckpt", 12345, "ep12345.ckpt"),
    ],
)
def test_names_as_frameworks_write_them(text: str, step: int, name: str) -> None:
    """The step goes where {N} is, with as many digits as asked at least, and comes back."""
    assert Template(text).name(step) == name
    assert Template(text).step_of(name) == step


@given(before=AROUND, place=WIDTHS, after=AROUND, step=st.integers(0, 10**15))
def test_what_a_template_names_it_reads_back(
    before: str, place: str, after: str, step: int
) -> None:
    """For any text around it, also such as means something to a regular expression."""
    template = Template(f"{before}{place}{after}")
    assert template.step_of(template.name(step)) == step


@given(
    place=WIDTHS, name=st.from_regex(r"(step[_-])?[0-9]{0,10}(_old|\.bak|\n| )?", fullmatch=True)
)
def test_what_is_read_back_is_what_would_be_named(place: str, name: str) -> None:
    """A name is a step only if that step would be called so: nothing else is ever ours."""
    template = Template(f"step_{place}")
    step = template.step_of(name)
    assert step is None or template.name(step) == name


@pytest.mark.parametrize(
    "name",
    [
        "step_100_mine",
        "my_step_100",
        "step_100.bak",
        "step_100 ",
        "step_100\n",
        "step_",
        "step_-1",
        "step_+1",
        "step_1e3",
        "step_007",
        "step_1_000",
        "step_\u0661\u0660\u0660",
        "step_\u00b2",
        "Step_100",
        "step-100",
        "weights_100",
        "step_100/extra",
        ".ckptfs",
        "",
    ],
)
def test_a_users_directory_is_never_taken_for_a_step(name: str) -> None:
    """torchtitan #4292: retention by substring deleted a backup; here it is no step at all."""
    assert Template("step_{N}").step_of(name) is None


def test_digits_count_where_they_were_asked_for() -> None:
    """With {N:04}, step 7 is 0007 and nothing else; a longer step needs no zeros."""
    template = Template("s{N:04}")
    assert [template.step_of(n) for n in ("s0007", "s7", "s00007", "s12345", "s012345")] == [
        7,
        None,
        None,
        12345,
        None,
    ]


@pytest.mark.parametrize(
    "text",
    [
        "step",
        "",
        "step_{n}",
        "step_{}",
        "step_{N}_{N}",
        "step_{N:8}",
        "step_{N:0}",
        "step_{N!r}",
        "a/{N}",
        "a\\{N}",
        "{N}/",
        "{N}\0",
        "{{N}}",
        ".{N}",
        "..{N}",
        "v2{N}",
        "{N}0",
    ],
)
def test_what_could_not_be_read_back_is_refused(text: str) -> None:
    """No place, two, another format, a path, a hidden name, a digit next to the step: at the start."""
    with pytest.raises(StateError, match="template"):
        Template(text)


def test_a_negative_step_has_no_name() -> None:
    """Steps count what was completed."""
    with pytest.raises(StateError, match="-1"):
        Template("step_{N}").name(-1)


@given(
    place=WIDTHS,
    after=AROUND,
    steps=st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)),
)
def test_two_steps_never_share_a_name(place: str, after: str, steps: tuple[int, int]) -> None:
    """Names are equal exactly if steps are."""
    template = Template(f"x{place}{after}")
    first, second = steps
    assert (template.name(first) == template.name(second)) == (first == second)
