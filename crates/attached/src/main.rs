//! `pagefold-agent`: the agent as one object that needs nothing of the process that it is put into. See
//! [`pagefold::attached`].

#![no_main]

use std::ffi::{c_char, c_int};

/// The C library calls this on the thread that was put into the process.
#[unsafe(no_mangle)]
extern "C" fn main(_: c_int, _: *const *const c_char) -> c_int {
    pagefold::attached::run()
}
