"""What compiled kernels share: how they are compiled, and how they reach the bytes of a buffer without a copy.

Importing this module imports numba (about 0.4 s), so nothing that ``import fastdata`` loads may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

# ruff: noqa: ARG001  (numba fixes the parameters of an intrinsic)

Function = TypeVar("Function", bound=Callable[..., Any])
Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]
"""Contiguous bytes."""
Pointer = Any
"""A pointer inside a kernel: indexes like an array."""


_OPTIONS = {"nogil": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
"""Of all kernels. With NumPy's error model divisions have no way to raise, which took a tenth of the time to compile:
kernels check what they divide by."""


def compiled(function: Function) -> Function:
    """Compile `function` with numba on its first call: without the GIL, kept on disk for the next process.

    A division by zero does not raise: it gives 0, or an infinity or NaN of floats.
    """
    return cast(Function, numba.njit(cache=True, **_OPTIONS)(function))


def helper(function: Function) -> Function:
    """Like `compiled`, for functions that only kernels call.

    They become part of those kernels, on disk too, so nothing is made to call them from Python: that would take as long
    to compile again.

    Each helper takes numba 10 ms at least, an operation 1 ms, a condition 4, a loop 12 (on a slow core), once for every
    combination of argument types; LLVM then optimizes a helper anew within every kernel and helper above it. So the
    first batch comes sooner where calls are few levels deep, where arguments are integers and pointers but no literals,
    which are types of their own, and where nothing makes an array or calls ``max``, ``min``, ``abs`` or functions of
    NumPy: these are helpers of numba's own (see `larger` and `smaller`).
    """
    return cast(Function, numba.njit(no_cpython_wrapper=True, **_OPTIONS)(function))


def inlined(function: Function) -> Function:
    """Like `helper`, always inlined."""
    return cast(Function, numba.njit(forceinline=True, no_cpython_wrapper=True, **_OPTIONS)(function))


def _intrinsic(function: Callable[..., Any]) -> Any:
    """Make a function that writes LLVM instructions callable from kernels, without its first argument."""
    return intrinsic(function)


def _pointer_to(item: Any) -> Any:
    """Return an intrinsic that turns an int64 address into a pointer to `item`, which indexes like an array.

    Helpers of kernels take pointers rather than arrays: numba counts references of an array at each call, with atomic
    instructions that made the entropy decoder four times as slow, and compiles each helper for every kind of array.

    A pointer keeps nothing alive, and numba frees an array after its last mention: take pointers of a kernel's own
    arguments alone, never of an array that it made.
    """

    @_intrinsic
    def pointer(_typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(item)(address), generate

    return pointer


byte_pointer = _pointer_to(types.uint8)
short_pointer = _pointer_to(types.uint16)
signed_short_pointer = _pointer_to(types.int16)
word_pointer = _pointer_to(types.uint32)
signed_word_pointer = _pointer_to(types.int32)
long_pointer = _pointer_to(types.int64)
double_pointer = _pointer_to(types.float64)


@_intrinsic
def copy_bytes(_typing: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes between two int64 addresses that do not overlap (memcpy). For kernels."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        to, from_ = builder.inttoptr(args[0], byte_pointer), builder.inttoptr(args[1], byte_pointer)
        cgutils.raw_memcpy(builder, to, from_, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_intrinsic
def zero_bytes(_typing: Any, target: Any, count: Any) -> Any:
    """Write `count` zeros at an int64 address (memset). For kernels."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        cgutils.memset(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _read_bits(bits: int) -> Any:
    """Return an intrinsic that reads an unsigned integer (of 64 bits: signed) at any byte of a uint8 pointer."""

    @_intrinsic
    def read(_typing: Any, data: Any, _at: Any, _highest_first: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            data, at, highest_first = args
            place = builder.bitcast(builder.gep(data, [at]), ir.IntType(bits).as_pointer())
            value = builder.load(place, align=1)
            value = builder.select(highest_first, builder.bswap(value), value)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return types.int64(data, types.int64, types.boolean), generate

    return read


read_u16, read_u32, read_i64 = _read_bits(16), _read_bits(32), _read_bits(64)
"""``(data, at, highest_first)`` to an int64, for kernels. numba compiles for little-endian processors only."""


def _chosen_by(comparison: str) -> Any:
    """Return an intrinsic that returns the one of two int64 for which ``first comparison second`` holds."""

    @_intrinsic
    def choose(_typing: Any, _first: Any, _second: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.select(builder.icmp_signed(comparison, *args), *args)

        return types.int64(types.int64, types.int64), generate

    return choose


larger, smaller = _chosen_by(">"), _chosen_by("<")
"""``max`` and ``min`` of two integers, for kernels: numba's own are helpers, which take longer to compile."""


@_intrinsic
def count_leading_zeros(_typing: Any, _value: Any) -> Any:
    """Return the zero bits above the highest one of an int64; 64 for 0. For kernels."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


@_intrinsic
def count_trailing_zeros(_typing: Any, _value: Any) -> Any:
    """Return the zero bits below the lowest one of an int64; 64 for 0. For kernels."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


@_intrinsic
def count_ones(_typing: Any, _value: Any) -> Any:
    """Return the ones among the bits of an int64. For kernels."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.int64), generate


integer = cast("Callable[[Any], int]", np.int64)
"""Widen to int64. For kernels: numba keeps uint8 unsigned, and int64 with uint64 gives float64."""


@compiled
def _note_address(data: NDArray[np.uint8], addresses: NDArray[np.int64], lengths: NDArray[np.int64], at: int) -> None:
    addresses[at] = data.ctypes.data
    lengths[at] = data.size


def locate(buffers: Sequence[Buffer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where buffers lie in memory, so that one kernel call can work on all of them.

    NumPy's own ways to an address (``.ctypes``, ``__array_interface__``) cost more than a microsecond; a compiled call
    on ``np.frombuffer`` costs about half of one.

    Args:
        buffers: n contiguous buffers. The caller keeps them alive for as long as the addresses are used.

    Returns:
        (n,) int64 addresses and (n,) int64 lengths in bytes.
    """
    addresses, lengths = np.empty(len(buffers), np.int64), np.empty(len(buffers), np.int64)
    for at, buffer in enumerate(buffers):
        _note_address(np.frombuffer(buffer, np.uint8), addresses, lengths, at)
    return addresses, lengths
