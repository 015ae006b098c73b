//! The `deltalink` command.
fn main() {}
