// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels: their sources, the compiler that is loaded at run time, and the cache of what it made.
//!
//! All kernels that a communicator may need are compiled, loaded and launched once when it is made: loading one later could
//! wait for a kernel that itself waits for a peer.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    fs, io,
    path::{Path, PathBuf},
    ptr::null_mut,
    sync::OnceLock,
};

use libloading::Library;
use pcieipc::{Result, reduce::Kind};
use sha2::{Digest, Sha256};

use crate::driver::refused;

const SOURCE: &str = include_str!("../kernels/allreduce.cu");
const PROBE: &str = include_str!("../kernels/probe.cu");
const HEADERS: [(&str, &str); 11] = [
    ("protocol.h", include_str!("../kernels/protocol.h")),
    ("device_ops.h", include_str!("../kernels/device_ops.h")),
    ("reduce.h", include_str!("../kernels/reduce.h")),
    ("memory.h", include_str!("../kernels/memory.h")),
    ("oneshot.h", include_str!("../kernels/oneshot.h")),
    ("flow.h", include_str!("../kernels/flow.h")),
    ("stream.h", include_str!("../kernels/stream.h")),
    ("engine.h", include_str!("../kernels/engine.h")),
    ("shares.h", include_str!("../kernels/shares.h")),
    ("direct.h", include_str!("../kernels/direct.h")),
    ("digest.h", include_str!("../kernels/digest.h")),
];

/// All element types.
pub const KINDS: [Kind; 12] = [
    Kind::F64,
    Kind::F32,
    Kind::F16,
    Kind::BF16,
    Kind::I8,
    Kind::I16,
    Kind::I32,
    Kind::I64,
    Kind::U8,
    Kind::U16,
    Kind::U32,
    Kind::U64,
];

/// The kernels of one type, by name.
pub const NAMES: [&str; 21] = [
    "pair_sum_two_u1",
    "pair_sum_two_u2",
    "pair_sum_many_u1",
    "pair_any_many_u1",
    "whole_sum_two_u1",
    "whole_sum_two_u2",
    "whole_wide_sum_two_u1",
    "whole_sum_many_u1",
    "whole_any_many_u1",
    "pair_flow_sum_two_p4u2",
    "whole_flow_sum_two_p4u1",
    "whole_flow_sum_two_p4u2",
    "whole_flow_sum_two_p8u2",
    "stream_sum_two_u4",
    "stream_sum_many_u2",
    "stream_any_many_u1",
    "engine_sum_two_u4",
    "shares_sum_many_u2",
    "shares_any_many_u1",
    "direct_sum_many_u2",
    "direct_any_many_u1",
];
/// The kernel that holds a copy engine back until the peer has consumed what the copy overwrites.
pub const GATE: &str = "gate";

/// The C++ type of an element.
pub fn element(kind: Kind) -> &'static str {
    match kind {
        Kind::F64 => "double",
        Kind::F32 => "float",
        Kind::F16 => "F16",
        Kind::BF16 => "Bf16",
        Kind::I8 => "signed char",
        Kind::I16 => "short",
        Kind::I32 => "int",
        Kind::I64 => "long long",
        Kind::U8 => "u8",
        Kind::U16 => "u16",
        Kind::U32 => "u32",
        Kind::U64 => "u64",
    }
}

/// Whether the kernels of this process record their steps.
pub fn traces() -> bool {
    defines().iter().any(|define| define == "-DPCIEIPC_TRACE")
}

/// What else the compiler is told, from the environment; only to measure what a part of the protocol costs, and to trace.
fn defines() -> Vec<String> {
    std::env::var("PCIEIPC_KERNEL_DEFINES").map(|d| d.split_whitespace().map(|d| format!("-D{d}")).collect()).unwrap_or_default()
}

macro_rules! compiler {
    ($($field:ident = $symbol:literal ($($argument:ty),*) -> $answer:ty;)*) => {
        struct Compiler {
            $($field: unsafe extern "C" fn($($argument),*) -> $answer,)*
            _library: Library,
        }
        impl Compiler {
            fn load(library: Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the types are those of NVRTC's header for these symbols.
                unsafe { Ok(Self { $($field: *library.get(concat!($symbol, "\0").as_bytes())?,)* _library: library }) }
            }
        }
    };
}
type Program = *mut c_void;
compiler! {
    version = "nvrtcVersion"(*mut c_int, *mut c_int) -> c_int;
    create = "nvrtcCreateProgram"(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;
    compile = "nvrtcCompileProgram"(Program, c_int, *const *const c_char) -> c_int;
    log_size = "nvrtcGetProgramLogSize"(Program, *mut usize) -> c_int;
    log = "nvrtcGetProgramLog"(Program, *mut c_char) -> c_int;
    cubin_size = "nvrtcGetCUBINSize"(Program, *mut usize) -> c_int;
    cubin = "nvrtcGetCUBIN"(Program, *mut c_char) -> c_int;
    destroy = "nvrtcDestroyProgram"(*mut Program) -> c_int;
}

/// The compiler, where it is installed. `PCIEIPC_NVRTC` names a library file; otherwise the usual names are tried.
fn compiler() -> Result<&'static Compiler> {
    static COMPILER: OnceLock<std::result::Result<Compiler, String>> = OnceLock::new();
    COMPILER
        .get_or_init(|| {
            let named = std::env::var("PCIEIPC_NVRTC").ok();
            let usual = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"].map(str::to_owned);
            let mut why = String::new();
            for name in named.into_iter().chain(usual) {
                // SAFETY: the compiler's library may be loaded at any time.
                match unsafe { Library::new(&name) }.and_then(Compiler::load) {
                    Ok(compiler) => return Ok(compiler),
                    Err(error) => why = error.to_string(),
                }
            }
            Err(why)
        })
        .as_ref()
        .map_err(|why| {
            refused(
                "loading NVRTC",
                why.clone(),
                "install CUDA's runtime compiler (the PyPI package nvidia-cuda-nvrtc has it) and name its file in PCIEIPC_NVRTC",
            )
        })
}

/// Machine code of all kernels of one type for one compute capability, from the cache or the compiler.
///
/// # Errors
/// `System` when there is neither, or the compiler refuses the source.
pub fn image(kind: Kind, capability: (u32, u32)) -> Result<Vec<u8>> {
    cached(kind.name(), SOURCE, element(kind), capability)
}

/// Machine code of the kernels that prove and measure paths.
///
/// # Errors
/// As for [`image`].
pub fn probe_image(capability: (u32, u32)) -> Result<Vec<u8>> {
    cached("probe", PROBE, "none", capability)
}

fn cached(name: &str, source: &str, element: &str, capability: (u32, u32)) -> Result<Vec<u8>> {
    let file = cache()?.join(format!("{}-{name}.cubin", key(source, element, capability)));
    if let Ok(image) = fs::read(&file) {
        return Ok(image);
    }
    let image = compile(source, element, capability)?;
    // A cache that can not be written costs time, not correctness.
    let _ = store(&file, &image);
    Ok(image)
}

/// Written under another name and renamed, so that no rank reads half a file.
fn store(file: &Path, image: &[u8]) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let part = file.with_extension(format!("part-{}", std::process::id()));
    fs::write(&part, image)?;
    fs::rename(&part, file)
}

fn cache() -> Result<PathBuf> {
    let folder = std::env::var_os("PCIEIPC_KERNEL_CACHE").map(PathBuf::from);
    let user = || {
        let home = std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache"));
        std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or(home).map(|c| c.join("pcieipc/kernels"))
    };
    folder.or_else(user).ok_or_else(|| {
        refused("finding the cache", "neither HOME nor XDG_CACHE_HOME is set", "set PCIEIPC_KERNEL_CACHE to a folder")
    })
}

/// Of everything that the machine code depends on, but for the compiler's version, which only makes it faster or slower.
fn key(source: &str, element: &str, capability: (u32, u32)) -> String {
    let mut hash = Sha256::new();
    hash.update(source);
    for (name, text) in HEADERS {
        hash.update(name);
        hash.update(text);
    }
    hash.update(format!("{element} {capability:?} {:?}", defines()));
    hash.finalize().iter().take(12).fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// Compiles the kernels of one type, without the cache.
///
/// # Errors
/// `System`, with the compiler's words.
pub fn compile_kind(kind: Kind, capability: (u32, u32)) -> Result<Vec<u8>> {
    compile(SOURCE, element(kind), capability)
}

fn compile(source: &str, element: &str, capability: (u32, u32)) -> Result<Vec<u8>> {
    let nvrtc = compiler()?;
    let text =
        |s: &str| CString::new(s).map_err(|_| refused("compiling kernels", "a zero in a source", "this should not happen"));
    let (source, name) = (text(source)?, text("kernels.cu")?);
    let names = HEADERS.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>>>()?;
    let texts = HEADERS.iter().map(|(_, body)| text(body)).collect::<Result<Vec<_>>>()?;
    let mut options = vec![
        format!("--gpu-architecture=sm_{}{}", capability.0, capability.1),
        "--std=c++17".to_owned(),
        format!("-DELEMENT={element}"),
    ];
    options.extend(defines());
    let options = options.iter().map(|o| text(o)).collect::<Result<Vec<_>>>()?;
    let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
    let (names, texts, options) = (pointers(&names), pointers(&texts), pointers(&options));
    let mut program = null_mut();
    // SAFETY: all strings live until the end of this function, and their numbers are as told; buffers have the sizes asked for.
    unsafe {
        let made =
            (nvrtc.create)(&mut program, source.as_ptr(), name.as_ptr(), HEADERS.len() as c_int, texts.as_ptr(), names.as_ptr());
        if made != 0 {
            return Err(refused("nvrtcCreateProgram", format!("error {made}"), "this should not happen"));
        }
        let status = (nvrtc.compile)(program, options.len() as c_int, options.as_ptr());
        let result = if status == 0 {
            let mut size = 0;
            (nvrtc.cubin_size)(program, &mut size);
            let mut image = vec![0u8; size];
            (nvrtc.cubin)(program, image.as_mut_ptr().cast());
            Ok(image)
        } else {
            let mut size = 0;
            (nvrtc.log_size)(program, &mut size);
            let mut log = vec![0u8; size + 1];
            (nvrtc.log)(program, log.as_mut_ptr().cast());
            let log = CStr::from_bytes_until_nul(&log).map(|l| l.to_string_lossy().into_owned()).unwrap_or_default();
            let (mut major, mut minor) = (0, 0);
            (nvrtc.version)(&mut major, &mut minor);
            Err(refused(
                "nvrtcCompileProgram",
                format!("error {status} of NVRTC {major}.{minor}: {log}"),
                "use a compiler that knows the device",
            ))
        };
        (nvrtc.destroy)(&mut program);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_kernel_is_in_the_source_and_the_other_way_round() {
        let made: Vec<String> = SOURCE
            .lines()
            .filter_map(|line| {
                let (macro_name, rest) = line.split_once('(')?;
                let words: Vec<&str> = rest.trim_end_matches(')').split(", ").collect();
                match (macro_name, words.as_slice()) {
                    ("LINES", [format, _, op, _, size, _, unroll]) => Some(format!("{format}_{op}_{size}_u{unroll}")),
                    ("WIDE", [format, _, op, _, size, _, unroll]) => Some(format!("{format}_wide_{op}_{size}_u{unroll}")),
                    ("FLOW", [format, _, op, _, size, push, take]) => Some(format!("{format}_flow_{op}_{size}_p{push}u{take}")),
                    ("STREAM", [op, _, size, _, unroll, _]) => Some(format!("stream_{op}_{size}_u{unroll}")),
                    ("ENGINE", [op, _, size, unroll, _]) => Some(format!("engine_{op}_{size}_u{unroll}")),
                    ("SHARES", [op, _, size, unroll, _]) => Some(format!("shares_{op}_{size}_u{unroll}")),
                    ("DIRECT", [op, _, size, unroll, _]) => Some(format!("direct_{op}_{size}_u{unroll}")),
                    _ => None,
                }
            })
            .collect();
        assert!(SOURCE.contains(&format!("void {GATE}(")));
        assert_eq!(made, NAMES);
    }

    #[test]
    fn machine_code_depends_on_type_and_device() {
        let of = |kind, capability| key(SOURCE, element(kind), capability);
        let keys = [of(Kind::F32, (9, 0)), of(Kind::F32, (8, 0)), of(Kind::BF16, (9, 0))];
        assert!(keys[0] != keys[1] && keys[0] != keys[2]);
    }
}
