//! The MPI's own functions, by the names that its profiling interface gives them.

use crate::abi::Handle;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// A generalized request's status function.
pub(crate) type Query = extern "C" fn(*mut c_void, *mut c_void) -> c_int;
/// A generalized request's function at its end.
pub(crate) type Free = extern "C" fn(*mut c_void) -> c_int;
/// A generalized request's function where it is cancelled.
pub(crate) type Cancel = extern "C" fn(*mut c_void, c_int) -> c_int;
/// What copies an attribute.
pub(crate) type Copy =
    extern "C" fn(Handle, c_int, *mut c_void, *mut c_void, *mut c_void, *mut c_int) -> c_int;
/// What deletes an attribute.
pub(crate) type Delete = extern "C" fn(Handle, c_int, *mut c_void, *mut c_void) -> c_int;

/// Handles of the loader's of the MPI's libraries, which are never closed.
static LIBRARIES: OnceLock<Vec<usize>> = OnceLock::new();

/// Notes the name of a library, if it is an MPI's.
extern "C" fn note(info: *mut libc::dl_phdr_info, _bytes: usize, names: *mut c_void) -> c_int {
    // SAFETY: the loader gives a description whose name ends with a zero, and passes on what `libraries` gave it.
    let (name, names) = unsafe { ((*info).dlpi_name, &mut *names.cast::<Vec<std::ffi::CString>>()) };
    if !name.is_null() {
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(name) };
        let file = name.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if file.starts_with(b"libmpi") {
            names.push(name.to_owned());
        }
    }
    0
}

/// Libraries of an MPI in this process. A program's part that was loaded for itself, as Python's are, has its MPI for itself, too.
fn libraries() -> Vec<usize> {
    let mut names: Vec<std::ffi::CString> = Vec::new();
    // SAFETY: the names are there until the call has returned.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut names).cast()) };
    let open = |name: &std::ffi::CString| {
        // SAFETY: the name ends with a zero, and the library is loaded already: nothing of it runs.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        (!handle.is_null()).then(|| handle.expose_provenance())
    };
    names.iter().filter_map(open).collect()
}

/// What a name is of in this process, if anything.
pub(crate) fn symbol(name: &CStr) -> Option<*mut c_void> {
    let within = |library: *mut c_void| {
        // SAFETY: the name ends with a zero; looking a symbol up has no other effect.
        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    };
    within(libc::RTLD_DEFAULT).or_else(|| {
        let libraries = LIBRARIES.get_or_init(libraries);
        libraries.iter().find_map(|library| within(std::ptr::with_exposed_provenance_mut(*library)))
    })
}

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        /// Functions of the MPI.
        #[derive(Debug)]
        pub(crate) struct Pmpi { $(pub(crate) $name: extern "C" fn($($argument),*) -> c_int,)* }

        impl Pmpi {
            /// Looks all of them up; an error is the name of one that is not there.
            fn load() -> Result<Self, &'static str> {
                Ok(Self { $(
                    $name: {
                        let name = concat!("P", stringify!($name), "\0");
                        let found = CStr::from_bytes_with_nul(name.as_bytes()).ok().and_then(symbol);
                        let found = found.ok_or(concat!("P", stringify!($name)))?;
                        // SAFETY: MPI's standard gives the function of that name these arguments. Handles are passed as registers of
                        // their full width, of which an MPI whose handles are `int` reads the lower half.
                        unsafe { std::mem::transmute::<*mut c_void, extern "C" fn($($argument),*) -> c_int>(found) }
                    },
                )* })
            }
        }
    };
}

/// A buffer that is read.
type In = *const c_void;
/// A buffer that is written, or the address of a handle.
type Out = *mut c_void;
/// Numbers by rank.
type Numbers = *const c_int;

functions! {
    MPI_Init(*mut c_int, *mut *mut *mut c_char);
    MPI_Init_thread(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int);
    MPI_Finalize();
    MPI_Get_library_version(*mut c_char, *mut c_int);
    MPI_Comm_size(Handle, *mut c_int);
    MPI_Comm_rank(Handle, *mut c_int);
    MPI_Comm_test_inter(Handle, *mut c_int);
    MPI_Comm_dup(Handle, Out);
    MPI_Comm_free(Out);
    MPI_Comm_create_keyval(Copy, Delete, *mut c_int, Out);
    MPI_Comm_free_keyval(*mut c_int);
    MPI_Comm_get_attr(Handle, c_int, Out, *mut c_int);
    MPI_Comm_set_attr(Handle, c_int, Out);
    MPI_Comm_call_errhandler(Handle, c_int);
    MPI_Iprobe(c_int, c_int, Handle, *mut c_int, Out);
    MPI_Type_size(Handle, *mut c_int);
    MPI_Type_get_extent(Handle, *mut isize, *mut isize);
    MPI_Type_dup(Handle, Out);
    MPI_Type_free(Out);
    MPI_Pack(In, c_int, Handle, Out, c_int, *mut c_int, Handle);
    MPI_Unpack(In, c_int, *mut c_int, Out, c_int, Handle, Handle);
    MPI_Grequest_start(Query, Free, Cancel, Out, Out);
    MPI_Grequest_complete(Handle);
    MPI_Status_set_elements(Out, Handle, c_int);
    MPI_Status_set_cancelled(Out, c_int);
    MPI_Wait(Out, Out);
    MPI_Waitall(c_int, Out, Out);
    MPI_Waitany(c_int, Out, *mut c_int, Out);
    MPI_Waitsome(c_int, Out, *mut c_int, *mut c_int, Out);
    MPI_Test(Out, *mut c_int, Out);
    MPI_Testall(c_int, Out, *mut c_int, Out);
    MPI_Testany(c_int, Out, *mut c_int, *mut c_int, Out);
    MPI_Testsome(c_int, Out, *mut c_int, *mut c_int, Out);
    MPI_Request_get_status(Handle, *mut c_int, Out);
    MPI_Allreduce(In, Out, c_int, Handle, Handle, Handle);
    MPI_Iallreduce(In, Out, c_int, Handle, Handle, Handle, Out);
    MPI_Reduce(In, Out, c_int, Handle, Handle, c_int, Handle);
    MPI_Ireduce(In, Out, c_int, Handle, Handle, c_int, Handle, Out);
    MPI_Bcast(Out, c_int, Handle, c_int, Handle);
    MPI_Ibcast(Out, c_int, Handle, c_int, Handle, Out);
    MPI_Allgather(In, c_int, Handle, Out, c_int, Handle, Handle);
    MPI_Iallgather(In, c_int, Handle, Out, c_int, Handle, Handle, Out);
    MPI_Allgatherv(In, c_int, Handle, Out, Numbers, Numbers, Handle, Handle);
    MPI_Iallgatherv(In, c_int, Handle, Out, Numbers, Numbers, Handle, Handle, Out);
    MPI_Alltoall(In, c_int, Handle, Out, c_int, Handle, Handle);
    MPI_Ialltoall(In, c_int, Handle, Out, c_int, Handle, Handle, Out);
    MPI_Alltoallv(In, Numbers, Numbers, Handle, Out, Numbers, Numbers, Handle, Handle);
    MPI_Ialltoallv(In, Numbers, Numbers, Handle, Out, Numbers, Numbers, Handle, Handle, Out);
    MPI_Reduce_scatter(In, Out, Numbers, Handle, Handle, Handle);
    MPI_Ireduce_scatter(In, Out, Numbers, Handle, Handle, Handle, Out);
    MPI_Reduce_scatter_block(In, Out, c_int, Handle, Handle, Handle);
    MPI_Ireduce_scatter_block(In, Out, c_int, Handle, Handle, Handle, Out);
    MPI_Barrier(Handle);
    MPI_Ibarrier(Handle, Out);
}

static PMPI: OnceLock<Pmpi> = OnceLock::new();

/// Functions of the MPI. Ends the process where it has none: the program could not run without this library either.
pub(crate) fn pmpi() -> &'static Pmpi {
    PMPI.get_or_init(|| {
        Pmpi::load().unwrap_or_else(|name| {
            eprintln!("harmonaize-mpi: there is no {name}: it is preloaded into a program of MPI 3 or newer");
            std::process::abort();
        })
    })
}
