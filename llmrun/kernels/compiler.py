"""The compiler process, which turns kernels from Python source into object files. Only this process imports Numba.

    python -m llmrun.kernels.compiler

A request is a frame with the arguments of `compile_kernel`. The answer is a frame with [error, object files], of which
one is empty. The parent is base/compiled/compiling.py.

Compiling in child processes keeps Numba (0.7 s, 100 MB) out of the main process, uses every core, and lets the user
interrupt the parent process.
"""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import types
from numba.core import codegen

from llmrun.base.processes import worker
from llmrun.base.processes.frames import Codec
from llmrun.kernels import object_file
from llmrun.kernels.faster_numba import make_faster

_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Mark a function (op, step, thread, n_threads) of int64 arguments as a kernel. Kernels are compiled on request."""
    function.is_kernel = True  # type: ignore[attr-defined]
    return function


def kernel_family(build: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    """Mark a function (level, **parameters) that builds a kernel for the given instruction-set level and parameters.

    If a family's kernels do not depend on the level, its function has no `level` parameter.
    """
    build.is_kernel_family = True  # type: ignore[attr-defined]
    return build


# Marks a helper function that is inlined into the kernels that call it.
inline_function = numba.njit(forceinline=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

# Marks a helper function that kernels call. Use it for long functions with several callers, because each inlined copy
# would be optimized again.
called_function = numba.njit(forceinline=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def compile_kernel(
    module: str,
    name: str,
    parameters: dict[str, Any],
    level_name: str,
    triples: list[str],
    cpu: str,
    features: str,
    symbol: str,
) -> list[bytes]:
    """Compile one kernel and return its object file for each triple, with `symbol` as its only global name.

    A triple with an operating system other than Linux yields COFF or Mach-O, unless it ends with "-elf".
    """
    found = getattr(importlib.import_module(f"llmrun.kernels.{module}"), name)
    function = _build(found, level_name, parameters) if getattr(found, "is_kernel_family", False) else found
    compiled = numba.njit(
        [_SIGNATURE],
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        error_model="numpy",
        nogil=True,
        cache=False,
    )(function)
    overload = compiled.overloads[compiled.signatures[0]]
    _optimize_library(overload.library)
    text = overload.library.get_llvm_str().replace(overload.fndesc.llvm_func_name, symbol)
    return [_emit(text, symbol, triple, cpu, features) for triple in triples]


def _build(
    family: Callable[..., Callable[..., None]], level_name: str, parameters: dict[str, Any]
) -> Callable[..., None]:
    level = {"level": level_name} if "level" in inspect.signature(family).parameters else {}
    return family(**level, **parameters)


def _emit(text: str, symbol: str, triple: str, cpu: str, features: str) -> bytes:
    if triple.startswith("x86_64"):
        text = _with_aligned_stack(text)
    llvm_module = llvm.parse_assembly(text)
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="default"
    )
    llvm_module.triple = triple
    llvm_module.data_layout = str(machine.target_data)
    # Each inlined helper leaves a public copy behind, which would make two kernels define the same name.
    for function in llvm_module.functions:
        if not function.is_declaration and function.name != symbol:
            function.linkage = llvm.Linkage.internal
    for variable in llvm_module.global_variables:
        if not variable.is_declaration:
            variable.linkage = llvm.Linkage.internal
    builder = llvm.create_pass_builder(machine, llvm.PipelineTuningOptions(speed_level=3))
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(llvm_module, builder)
    # Numba numbers the functions of a process, but an object file must not depend on which kernels came before it.
    called = (function for function in llvm_module.functions if not function.is_declaration and function.name != symbol)
    for number, function in enumerate(called):
        function.name = f"called.{number}"
    for number, variable in enumerate(llvm_module.global_variables):
        variable.name = f"constant.{number}"
    emitted: bytes = machine.emit_object(llvm_module)
    if emitted.startswith(object_file.MAGIC):  # the linker checks the symbols of COFF and Mach-O
        object_file.check_symbols(emitted, symbol)
    return emitted


def _with_aligned_stack(text: str) -> str:
    """Make every function align its stack to cache lines, given the text of an LLVM module.

    Callers align it only to 16 bytes. LLVM finds out that vectors of 32 or 64 bytes do not fit in the registers when it
    can no longer raise the alignment. Depending on the size of the frame, vectors on the stack then straddle cache
    lines: a tile of 4 rows took 65 ns per block instead of 37 (Q6_K, AVX2).
    """
    return re.sub(r"^(define .*) \{$", r"\1 alignstack(64) {", text, flags=re.MULTILINE)


_optimize_library = codegen.CPUCodeLibrary._optimize_final_module


def _optimize_only_kernels() -> None:
    """Stop Numba from optimizing functions. `compile_kernel` optimizes each kernel once, with all of its helpers.

    Numba would also optimize each helper on its own. Without that, compiling the 21 kernels of SmolLM2 takes 11.9 s of
    CPU time instead of 16.5 s, and the kernels are equally fast (within 2 %).
    """

    # Numba's `_optimize_functions` also sets the data layout, which is still needed.
    def set_data_layout(library: Any, module: Any) -> None:
        module.data_layout = library._codegen._data_layout

    codegen.CPUCodeLibrary._optimize_functions = set_data_layout
    codegen.CPUCodeLibrary._optimize_final_module = lambda library: None


def _make_no_code_for_this_process() -> None:
    """Stop Numba from also generating machine code for this process.

    This process never runs that code, and LLVM would abort the process if the processor does not support an intrinsic.
    """
    codegen.JITCodeLibrary._finalize_specific = lambda library: None
    codegen.JITCPUCodegen.set_env = lambda codegen, name, environment: None


def serve() -> None:
    """Answer requests until stdin is closed."""
    make_faster()
    _optimize_only_kernels()
    _make_no_code_for_this_process()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()  # for the instructions in kernels/processor.py
    requests: Codec[dict[str, Any]] = Codec(dict[str, Any])
    answers: Codec[tuple[str, list[bytes]]] = Codec(tuple[str, list[bytes]])

    def answer(request: bytes) -> bytes:
        try:
            return answers.encode(("", compile_kernel(**requests.decode(request))))
        except Exception:  # noqa: BLE001 - the parent process reports every error with its traceback
            return answers.encode((traceback.format_exc(), []))

    worker.serve(answer)


if __name__ == "__main__":
    serve()
