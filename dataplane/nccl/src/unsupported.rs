//! Entries of NCCL that the provider's collectives have no counterpart of: each says so.

use crate::result::{Failure, entry, ncclResult_t};

/// Nothing: what this library logs is said by `HARMONAIZE_DEBUG` when a process attaches.
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInit() {}

/// Nothing: there are no parameters of NCCL.
#[unsafe(no_mangle)]
pub extern "C" fn ncclParamDumpAll() {}

/// Entries that fail whatever they are given, by what NCCL does there.
macro_rules! unsupported {
    ($($name:ident: $what:literal;)*) => {
        $(
            #[doc = concat!("Not supported: ", $what, ".")]
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> ncclResult_t {
                entry(|| Err(Failure::usage(concat!(stringify!($name), ": this library has no ", $what))))
            }
        )*
    };
}

// Arguments that a caller passes beside are left where they are: C's callers pass and clear them.
unsupported! {
    ncclCommGrow: "ranks that are added to a communicator";
    ncclCommGetUniqueId: "ranks that are added to a communicator";
    ncclCommSuspend: "memory of devices";
    ncclCommResume: "memory of devices";
    ncclCommMemStats: "memory of devices";
    ncclCommWindowRegister: "windows for one-sided access";
    ncclCommWindowDeregister: "windows for one-sided access";
    ncclWinGetUserPtr: "windows for one-sided access";
    ncclPutSignal: "one-sided access";
    ncclSignal: "one-sided access";
    ncclWaitSignal: "one-sided access";
    ncclSetEncryption: "encryption by the tenant: the provider protects what travels";
    ncclParamBind: "parameters of NCCL";
    ncclParamGetI8: "parameters of NCCL";
    ncclParamGetI16: "parameters of NCCL";
    ncclParamGetI32: "parameters of NCCL";
    ncclParamGetI64: "parameters of NCCL";
    ncclParamGetU8: "parameters of NCCL";
    ncclParamGetU16: "parameters of NCCL";
    ncclParamGetU32: "parameters of NCCL";
    ncclParamGetU64: "parameters of NCCL";
    ncclParamGetStr: "parameters of NCCL";
    ncclParamGet: "parameters of NCCL";
    ncclParamGetParameter: "parameters of NCCL";
    ncclParamGetAllParameterKeys: "parameters of NCCL";
    ncclCommQueryProperties: "collectives inside of kernels";
    ncclDevCommCreate: "collectives inside of kernels";
    ncclDevCommDestroy: "collectives inside of kernels";
    ncclGetCftDeviceLeInfo: "collectives inside of kernels";
    ncclGetLsaDevicePointer: "collectives inside of kernels";
    ncclGetLsaMultimemDevicePointer: "collectives inside of kernels";
    ncclGetMultimemDeviceLeInfo: "collectives inside of kernels";
    ncclGetMultimemDevicePointer: "collectives inside of kernels";
    ncclGetPeerDeviceLeInfo: "collectives inside of kernels";
    ncclGetPeerDevicePointer: "collectives inside of kernels";
    ncclGinBarrierCreateRequirement: "collectives inside of kernels";
    ncclGinInboxA2ACreateRequirement: "collectives inside of kernels";
    ncclGinOutboxCreateRequirement: "collectives inside of kernels";
    ncclLLA2ACalcSlots: "collectives inside of kernels";
    ncclLLA2ACreateRequirement: "collectives inside of kernels";
    ncclLsaBarrierCreateRequirement: "collectives inside of kernels";
}
