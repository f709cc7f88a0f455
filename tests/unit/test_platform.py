"""The platform says what decides numbers, and nothing about who or where."""

import getpass
import json
import socket

from pharos.runtime.platform import cpu_flags, describe_platform, isa_level


def test_the_fingerprint_moves_with_dtype_and_attention_and_is_stable():
    one = describe_platform("cpu", "float32", "sdpa")
    assert one == describe_platform("cpu", "float32", "sdpa")
    others = [describe_platform("cpu", "bfloat16", "sdpa"), describe_platform("cpu", "float32")]
    assert len({platform["fingerprint"] for platform in [one, *others]}) == 3


def test_a_job_that_computes_nothing_has_no_dtype():
    assert describe_platform()["dtype"] is None


def test_the_widest_instruction_set_names_the_level():
    assert isa_level(frozenset({"sse4_2", "avx", "avx2", "avx512f", "avx512_bf16"})) == (
        "avx512_bf16"
    )
    assert isa_level(frozenset({"sse4_2", "avx", "avx2"})) == "avx2"
    assert isa_level(frozenset()) == "baseline"


def test_flags_are_read_from_the_first_processor(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags\t\t: fpu avx2\n\nprocessor : 1\nflags : fpu\n")
    assert cpu_flags(file) == {"fpu", "avx2"}
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_neither_host_nor_user_is_in_it():
    text = json.dumps(describe_platform())
    assert socket.gethostname() not in text
    assert f'"{getpass.getuser()}"' not in text
