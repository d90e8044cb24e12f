//! Puts Pagefold's agent, which folds a process's pages from inside, into a running process, and takes it out again.
#![forbid(unsafe_code)]

pub mod c_library;
pub mod changes;
pub mod children;
pub mod ending;
pub mod gate;
pub mod halt;
pub mod inject;
pub mod ksm;
pub mod look;
pub mod memory;
pub mod mend;
pub mod object;
pub mod program;
pub mod refuse;
pub mod remote;
pub mod rescue;
pub mod serve;
pub mod stop;
pub mod take_over;
#[cfg(test)]
mod testing;
pub mod threads;
pub mod waited;
pub mod watched;
