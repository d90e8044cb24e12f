//! `libpagefold.so`: folds the pages of the process it is loaded into.

mod arena;
mod cpu_time;
mod doors;
mod fold;
mod give_way;
mod link;
mod lock;
mod patience;
mod pool;
mod raw;
mod references;
mod refold;
mod regain;
mod round;
mod section;
mod start;
mod table;
#[cfg(test)]
mod testing;
mod thread;
mod turnover;
mod unfold;
mod witness;
