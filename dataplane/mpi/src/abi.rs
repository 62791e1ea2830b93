//! What a program's MPI calls things: handles, constants, and which of its types and operations the provider has.

mod mpich;
mod open_mpi;

use crate::pmpi::{pmpi, symbol};
use harmonaize_client::{Dtype, ReduceOp};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};

/// A handle of the MPI as it is passed: an address, or an `int` in the lower half of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Handle(pub(crate) usize);

/// A type that needs no packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Type {
    /// Bytes of an element, which follow one another without gaps.
    pub(crate) bytes: usize,
    /// As what the provider reduces it, if at all.
    pub(crate) dtype: Option<Dtype>,
}

/// What a program's MPI calls things.
#[derive(Debug)]
pub(crate) struct Abi {
    /// Whether handles are of 32 bits.
    narrow: bool,
    pub(crate) comm_world: Handle,
    pub(crate) comm_self: Handle,
    pub(crate) comm_null: Handle,
    pub(crate) byte: Handle,
    pub(crate) int: Handle,
    pub(crate) int64: Handle,
    pub(crate) min: Handle,
    pub(crate) max: Handle,
    /// `MPI_IN_PLACE`.
    pub(crate) in_place: usize,
    /// `MPI_STATUS_IGNORE`.
    pub(crate) status_ignore: usize,
    /// `MPI_ERR_OTHER`.
    pub(crate) other_error: c_int,
    types: HashMap<usize, Type>,
    operations: HashMap<usize, ReduceOp>,
}

/// Most bytes of `MPI_Get_library_version` in any MPI.
const VERSION_BYTES: usize = 8192;

impl Abi {
    /// That of the MPI in this process; an error names one that is not known.
    pub(crate) fn find() -> Result<Self, String> {
        if symbol(c"ompi_mpi_comm_world").is_some() {
            return open_mpi::abi();
        }
        let mut text = vec![0_u8; VERSION_BYTES];
        let mut length: c_int = 0;
        (pmpi().MPI_Get_library_version)(text.as_mut_ptr().cast::<c_char>(), &raw mut length);
        text.truncate(usize::try_from(length).unwrap_or(0));
        let version = String::from_utf8_lossy(&text).into_owned();
        let lines = version.lines().next().unwrap_or_default().to_owned();
        if ["MPICH", "Intel(R) MPI", "MVAPICH"].iter().any(|name| version.contains(name)) {
            return Ok(mpich::abi());
        }
        Err(format!("the ABI of this MPI is not known here: {lines}"))
    }

    /// `MPI_STATUS_IGNORE` as it is passed.
    pub(crate) fn no_status(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.status_ignore)
    }

    /// The same handle without what may be in the upper half of the register.
    pub(crate) fn known(&self, handle: Handle) -> usize {
        if self.narrow { handle.0 & 0xffff_ffff } else { handle.0 }
    }

    /// A type that needs no packing.
    pub(crate) fn plain(&self, handle: Handle) -> Option<Type> {
        self.types.get(&self.known(handle)).copied()
    }

    /// An operation of MPI's that the provider has.
    pub(crate) fn operation(&self, handle: Handle) -> Option<ReduceOp> {
        self.operations.get(&self.known(handle)).copied()
    }

    /// Reads a handle of an array of the program's.
    pub(crate) fn read(&self, array: *const c_void, at: usize) -> Handle {
        if self.narrow {
            // SAFETY: the program's array has so many handles of 32 bits.
            Handle(unsafe { array.cast::<u32>().add(at).read() } as usize)
        } else {
            // SAFETY: the program's array has so many handles, which are addresses.
            Handle(unsafe { array.cast::<usize>().add(at).read() })
        }
    }
}

/// The tables by what handles are.
fn tables(
    types: impl Iterator<Item = (usize, Type)>,
    operations: impl Iterator<Item = (usize, ReduceOp)>,
) -> (HashMap<usize, Type>, HashMap<usize, ReduceOp>) {
    (types.collect(), operations.collect())
}

#[cfg(test)]
mod tests {
    //! The tables against the headers of the MPIs themselves, by their compilers.

    use super::{mpich, open_mpi};
    use harmonaize_client::{Dtype, ReduceOp};
    use std::fmt::Write as _;
    use std::process::Command;

    /// Runs a program that an MPI's compiler has compiled; nothing where there is no such compiler.
    fn run(compiler: &str, body: &str) -> Option<()> {
        let folder = tempfile::tempdir().unwrap();
        let (source, program) = (folder.path().join("abi.c"), folder.path().join("abi"));
        let head = "#include <mpi.h>\n#include <stdint.h>\n#include <stdio.h>\n#include <complex.h>\n#define CHECK(holds) \
                    ((holds) ? (void)0 : (void)(wrong = 1, fprintf(stderr, \"%s\\n\", #holds)))\nint main(void) {\n int wrong = 0;\n MPI_Init(0, 0);\n";
        std::fs::write(&source, format!("{head}{body} MPI_Finalize();\n return wrong;\n}}\n")).unwrap();
        let compiled = Command::new(compiler).arg(&source).arg("-o").arg(&program).output();
        let Ok(compiled) = compiled else {
            harmonaize_testkit::strict::skip_test(format!("there is no {compiler}"));
            return None;
        };
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let ran = Command::new(&program).output().unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        Some(())
    }

    /// What a type of the provider's is in C.
    fn c_type(dtype: Dtype) -> &'static str {
        match dtype {
            Dtype::I8 => "int8_t",
            Dtype::U8 => "uint8_t",
            Dtype::I16 => "int16_t",
            Dtype::U16 => "uint16_t",
            Dtype::I32 => "int32_t",
            Dtype::U32 => "uint32_t",
            Dtype::I64 => "int64_t",
            Dtype::U64 => "uint64_t",
            Dtype::F32 => "float",
            Dtype::F64 => "double",
            Dtype::Complex64 => "float complex",
            Dtype::Complex128 => "double complex",
            other => panic!("no type of MPI's is {other}"),
        }
    }

    fn operations(names: impl Iterator<Item = (&'static str, ReduceOp)>) {
        for (name, reduce) in names {
            let expected = match reduce {
                ReduceOp::Sum => "MPI_SUM",
                ReduceOp::Product => "MPI_PROD",
                ReduceOp::Min => "MPI_MIN",
                ReduceOp::Max => "MPI_MAX",
                ReduceOp::BitAnd => "MPI_BAND",
                ReduceOp::BitOr => "MPI_BOR",
                ReduceOp::BitXor => "MPI_BXOR",
                other => panic!("no operation of MPI's is {other}"),
            };
            assert_eq!(name, expected);
        }
    }

    #[test]
    fn mpichs_constants_are_those_of_its_header() {
        let mut body = String::new();
        for (name, value, bytes, dtype) in mpich::TYPES {
            let _ = writeln!(body, " CHECK((unsigned){name} == {value:#x}u);");
            let _ =
                writeln!(body, " {{ int size = 0; MPI_Type_size({name}, &size); CHECK(size == {bytes}); }}");
            if let Some(dtype) = dtype {
                let _ = writeln!(body, " CHECK(sizeof({}) == {bytes});", c_type(*dtype));
            }
        }
        for (name, value, _) in mpich::OPERATIONS {
            let _ = writeln!(body, " CHECK((unsigned){name} == {value:#x}u);");
        }
        operations(mpich::OPERATIONS.iter().map(|(name, _, reduce)| (*name, *reduce)));
        let abi = mpich::abi();
        for (name, handle) in [
            ("MPI_COMM_WORLD", abi.comm_world),
            ("MPI_COMM_SELF", abi.comm_self),
            ("MPI_COMM_NULL", abi.comm_null),
            ("MPI_BYTE", abi.byte),
            ("MPI_INT", abi.int),
            ("MPI_INT64_T", abi.int64),
            ("MPI_MIN", abi.min),
            ("MPI_MAX", abi.max),
        ] {
            let _ = writeln!(body, " CHECK((unsigned){name} == {:#x}u);", handle.0);
        }
        let _ = writeln!(body, " CHECK((uintptr_t)MPI_IN_PLACE == {:#x}ul);", abi.in_place);
        let _ = writeln!(body, " CHECK((uintptr_t)MPI_STATUS_IGNORE == {:#x}ul);", abi.status_ignore);
        let _ = writeln!(body, " CHECK(MPI_ERR_OTHER == {} && sizeof(MPI_Comm) == 4);", abi.other_error);
        run("mpicc.mpich", &body);
    }

    #[test]
    fn open_mpis_symbols_are_those_of_its_header() {
        let mut body = String::new();
        let mut same = |name: &str, symbol: &std::ffi::CStr| {
            let symbol = symbol.to_str().unwrap();
            // The header declares each as an object of some type.
            let _ = writeln!(body, " CHECK((uintptr_t){name} == (uintptr_t)&{symbol});");
        };
        for (name, symbol, _, _) in open_mpi::TYPES {
            same(name, symbol);
        }
        for (name, symbol, _) in open_mpi::OPERATIONS {
            same(name, symbol);
        }
        for (name, symbol) in open_mpi::COMMUNICATORS {
            same(name, symbol);
        }
        for (name, _, bytes, dtype) in open_mpi::TYPES {
            let _ =
                writeln!(body, " {{ int size = 0; MPI_Type_size({name}, &size); CHECK(size == {bytes}); }}");
            if let Some(dtype) = dtype {
                let _ = writeln!(body, " CHECK(sizeof({}) == {bytes});", c_type(*dtype));
            }
        }
        operations(open_mpi::OPERATIONS.iter().map(|(name, _, reduce)| (*name, *reduce)));
        let _ = writeln!(body, " CHECK((uintptr_t)MPI_IN_PLACE == {});", open_mpi::IN_PLACE);
        let _ = writeln!(body, " CHECK((uintptr_t)MPI_STATUS_IGNORE == {});", open_mpi::STATUS_IGNORE);
        let _ =
            writeln!(body, " CHECK(MPI_ERR_OTHER == {} && sizeof(MPI_Comm) == 8);", open_mpi::OTHER_ERROR);
        run("mpicc.openmpi", &body);
    }
}
