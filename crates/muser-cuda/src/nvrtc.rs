//! Kernel text to machine code, once for a card: the result is kept in a folder, keyed by text, flags and compiler.

use cudarc::nvrtc::{result, sys};
use muser_core::{DeviceError, Lane};
use sha2::{Digest, Sha256};
use std::ffi::{CStr, CString};
use std::path::Path;

/// Machine code of `source` for `arch` (such as `sm_90`) with the arithmetic of a lane.
pub(crate) fn cubin(
    name: &str,
    source: &str,
    arch: &str,
    lane: Lane,
    cache: Option<&Path>,
) -> Result<Vec<u8>, DeviceError> {
    let arithmetic = match lane {
        Lane::Serving => "--use_fast_math",
        Lane::Strict => "--fmad=false",
    };
    let options = [arithmetic.to_string(), format!("--gpu-architecture={arch}"), "--std=c++17".to_string()];
    let mut hash = Sha256::new();
    hash.update(source);
    hash.update(options.join(" "));
    hash.update(format!("{:?}", version()));
    let key: String = hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect();
    let path = cache.map(|folder| folder.join(format!("{name}-{arch}-{key}.cubin")));
    if let Some(kept) = path.as_ref().and_then(|p| std::fs::read(p).ok()) {
        return Ok(kept);
    }
    let built = compile(name, source, &options)?;
    if let Some(path) = path {
        // Written beside and renamed, so that another process never reads half a file. A folder that cannot be written only
        // costs the next start its seconds.
        let part = path.with_extension(format!("{}.part", std::process::id()));
        let kept = path
            .parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| std::fs::write(&part, &built));
        if kept.and_then(|()| std::fs::rename(&part, &path)).is_err() {
            let _ = std::fs::remove_file(part);
        }
    }
    Ok(built)
}

fn version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two integers; a failure leaves them 0.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    (major, minor)
}

fn compile(name: &str, source: &str, options: &[String]) -> Result<Vec<u8>, DeviceError> {
    let failed = |what: &str, detail: String| {
        DeviceError::Backend(format!("NVRTC {:?}: {what} {name}.cu: {detail}", version()))
    };
    let text = CString::new(source).map_err(|e| failed("read", e.to_string()))?;
    let label = CString::new(format!("{name}.cu")).map_err(|e| failed("name", e.to_string()))?;
    let program =
        result::create_program(&text, Some(&label)).map_err(|e| failed("create", format!("{e:?}")))?;
    // SAFETY: the program lives until it is destroyed at the end of this function.
    let built = unsafe {
        match result::compile_program(program, options) {
            Err(error) => {
                let log = result::get_program_log(program).unwrap_or_default();
                let bytes: Vec<u8> = log.iter().map(|c| *c as u8).chain([0]).collect();
                let log = CStr::from_bytes_until_nul(&bytes).map(|l| l.to_string_lossy().into_owned());
                Err(failed("compile", format!("{error:?}\n{}", log.unwrap_or_default())))
            }
            Ok(()) => {
                let mut size = 0;
                let sized = sys::nvrtcGetCUBINSize(program, &mut size).result();
                let mut code = vec![0u8; size];
                let got = sized.and_then(|()| sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result());
                got.map(|()| code).map_err(|e| failed("read the code of", format!("{e:?}")))
            }
        }
    };
    // SAFETY: not used afterwards.
    let _ = unsafe { result::destroy_program(program) };
    built
}
