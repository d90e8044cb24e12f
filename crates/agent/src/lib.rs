//! `libpagefold.so`, the agent: preloaded into a process, it folds the pages of that process. ARCHITECTURE.md, section
//! "Folding", shows how its modules work together.

mod arena;
mod child;
mod collapse;
mod cpu_time;
mod fold;
mod follow;
mod forks;
mod give_way;
mod hooks;
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
