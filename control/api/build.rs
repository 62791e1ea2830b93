//! Compiles the protocol buffers with a pure-Rust compiler, so that a build needs no `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(
        [
            "aggregation.proto",
            "agreements.proto",
            "coding.proto",
            "events.proto",
            "operator.proto",
            "paths.proto",
            "provider.proto",
            "telemetry.proto",
        ]
        .map(|file| format!("harmonaize/provider/v1/{file}")),
        ["proto"],
    )?;
    // These hold secrets; they show themselves in src/lib.rs.
    let secret =
        ["Peer", "Aggregation", "GrantAggregation"].map(|name| format!("harmonaize.provider.v1.{name}"));
    tonic_prost_build::configure().skip_debug(secret).compile_fds(descriptors)?;
    Ok(())
}
