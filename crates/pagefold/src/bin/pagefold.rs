//! `pagefold`: the use of every page of every guest, the other holders of the same bytes, and the cost.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    commands::main()
}
