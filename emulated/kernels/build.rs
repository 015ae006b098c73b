//! Compiles the device's bodies for the host.

fn main() {
    println!("cargo::rustc-cfg=emulated");
    println!("cargo::rerun-if-changed=build.rs");
}
