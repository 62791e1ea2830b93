//! Compiles the protocol buffers with a pure-Rust compiler, so that a build needs no `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(
        ["coding.proto", "operator.proto", "paths.proto", "provider.proto", "telemetry.proto"]
            .map(|file| format!("harmonaize/provider/v1/{file}")),
        ["proto"],
    )?;
    // `Peer` holds a secret; it shows itself in src/lib.rs.
    tonic_prost_build::configure().skip_debug(["harmonaize.provider.v1.Peer"]).compile_fds(descriptors)?;
    Ok(())
}
