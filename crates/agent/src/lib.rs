//! `libpagefold.so`: folds the pages of the process it is loaded into.

mod arena;
mod fold;
mod link;
mod lock;
mod patience;
mod pool;
mod raw;
mod references;
mod round;
mod section;
mod start;
mod table;
mod thread;
mod unfold;

mod doors {
    //! In place of the doors until they are hung.
    use page::{HostVirt, PageRange};
    pub fn init(_all_anonymous: bool) {}
    pub fn ask_heap() {}
    pub fn why_nothing_is_enrolled() -> String {
        String::new()
    }
    #[unsafe(no_mangle)]
    extern "C" fn madvise(at: *mut libc::c_void, length: usize, advice: libc::c_int) -> libc::c_int {
        if advice == libc::MADV_MERGEABLE {
            crate::table::lock().ask(PageRange { start: HostVirt(at as u64), pages: length as u64 / 4096 });
            return 0;
        }
        // SAFETY: passed on as it came.
        unsafe { libc::syscall(libc::SYS_madvise, at, length, advice) as libc::c_int }
    }
}
