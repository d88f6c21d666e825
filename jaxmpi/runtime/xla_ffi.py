"""Structures of XLA's C interface for functions that programs call, in ctypes.

XLA calls functions of the user's through its foreign function interface (FFI), the header `xla/ffi/api/c_api.h` in
`jax.ffi.include_dir()`. Such a function, a handler, is C: it takes a pointer to a call frame and returns a pointer to
an error, or null. The frame has all that a call needs: the stage; operands and results as buffers, each with a type
number, an address and dimensions; the program's constants as attributes; and a table of XLA's own functions, two of
which make an error and give a GPU's stream. A class here lists the fields of one of the header's structures in their
order. With the class Python reads XLA's memory in place. Its docstring has the header's name.

Not every call is work. When a handler is registered, XLA calls it with a frame that has the metadata extension: the
handler writes there which version of the header it follows. Later calls name a stage. Stages before `EXECUTE` have no
data yet, and a handler here does nothing in them.

Most structures begin with their size and a list of extensions. A new minor version adds fields, at the end. So the
fields known here stay where they are, and XLA's structure may be longer than the class. A shorter one is of another
interface and must not be read. A new major version may move fields.
"""

import ctypes
import struct
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p

import ml_dtypes
import numpy as np

MAJOR, MINOR = 0, 3  # version of the header followed here; 0.5 has the same fields in the same places
EXECUTE, METADATA, STRING, INTERNAL = 3, 1, 4, 13  # stage, extension, kind of attribute, error code


class FfiExtension(ctypes.Structure):
    """XLA_FFI_Extension_Base."""

    _fields_ = (("struct_size", c_size_t), ("kind", c_int), ("next", c_void_p))


class FfiApiVersion(ctypes.Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int))


class FfiMetadata(ctypes.Structure):
    """XLA_FFI_Metadata."""

    _fields_ = (("struct_size", c_size_t), ("version", FfiApiVersion), ("traits", c_uint32))


class FfiMetadataExtension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = (("base", FfiExtension), ("metadata", POINTER(FfiMetadata)))


class FfiByteSpan(ctypes.Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = (("text", c_void_p), ("length", c_size_t))


class FfiScalar(ctypes.Structure):
    """XLA_FFI_Scalar."""

    _fields_ = (("dtype", c_int), ("value", c_void_p))


# XLA_FFI_Buffer: struct_size, extension, dtype, data, rank, dims. A program may have hundreds of them, and a field of a
# ctypes structure takes longer to read than all of these.
BUFFER = struct.Struct("@NPiPqP")


class FfiBuffers(ctypes.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("size", c_int64),
        ("kinds", POINTER(c_int)),
        ("items", c_void_p),  # XLA_FFI_Buffer**
    )


class FfiAttributes(ctypes.Structure):
    """XLA_FFI_Attrs."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("size", c_int64),
        ("kinds", POINTER(c_int)),
        ("names", POINTER(POINTER(FfiByteSpan))),
        ("items", POINTER(c_void_p)),
    )


class FfiCreateError(ctypes.Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int))


class FfiGetStream(ctypes.Structure):
    """XLA_FFI_Stream_Get_Args."""

    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("stream", c_void_p))


class FfiApi(ctypes.Structure):
    """The beginning of XLA_FFI_Api."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("version", FfiApiVersion),
        ("internal", c_void_p),
        ("create_error", ctypes.CFUNCTYPE(c_void_p, POINTER(FfiCreateError))),
        ("get_message", c_void_p),
        ("destroy", c_void_p),
        ("register", c_void_p),
        ("get_stream", ctypes.CFUNCTYPE(c_void_p, POINTER(FfiGetStream))),
    )


class FfiCallFrame(ctypes.Structure):
    """XLA_FFI_CallFrame, as far as it is read."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", POINTER(FfiExtension)),
        ("api", POINTER(FfiApi)),
        ("context", c_void_p),
        ("stage", c_int),
        ("operands", FfiBuffers),
        ("results", FfiBuffers),
        ("attributes", FfiAttributes),
    )


TOKEN = 17
DTYPES = {  # by the header's numbers; those of 1, 2 and 4 bits are left out: XLA may pack them
    1: np.dtype(bool),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.uint8),
    7: np.dtype(np.uint16),
    8: np.dtype(np.uint32),
    9: np.dtype(np.uint64),
    10: np.dtype(np.float16),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
    15: np.dtype(np.complex64),
    16: np.dtype(ml_dtypes.bfloat16),
    18: np.dtype(np.complex128),
    19: np.dtype(ml_dtypes.float8_e5m2),
    20: np.dtype(ml_dtypes.float8_e4m3fn),
    23: np.dtype(ml_dtypes.float8_e4m3b11fnuz),
    24: np.dtype(ml_dtypes.float8_e5m2fnuz),
    25: np.dtype(ml_dtypes.float8_e4m3fnuz),
    28: np.dtype(ml_dtypes.float8_e4m3),
    29: np.dtype(ml_dtypes.float8_e3m4),
    33: np.dtype(ml_dtypes.float8_e8m0fnu),
}
