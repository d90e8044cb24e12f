//! `libpagefold.so`: folds the pages of the process it is loaded into.

mod arena;
mod cpu_time;
mod doors;
mod fold;
mod follow;
mod give_way;
mod keeper;
mod link;
mod lock;
mod maps;
mod patience;
mod place;
mod pool;
mod raw;
mod references;
mod refold;
mod regain;
mod round;
mod section;
mod spawn;
mod start;
mod table;
#[cfg(test)]
mod testing;
mod thread;
mod turnover;
mod unfold;
mod witness;
