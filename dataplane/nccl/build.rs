//! Gives the library NCCL's own name for the loader, so that a program that needs that one takes this one where it is preloaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
}
