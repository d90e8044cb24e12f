//! Work for guests of a bench or a test: shell commands to run in a VM.

/// A churn of page cache, database and processes: it runs in the background until the guest ends.
///
/// - Each turn inserts 500 rows into a table of the database, updates 200 and deletes `deleted_rows`: with 500, the table
///   keeps its size. Then it starts a process that sleeps for a second.
/// - Meanwhile each pass over the system's files reads them all, pauses for `pause_seconds`, drops the page cache, and pauses
///   as long again.
///
/// A command that the guest's image lacks fails quickly, and the others go on.
pub fn churn_script(pause_seconds: u64, deleted_rows: u32) -> String {
    format!(
        "(while :; do \
         mariadb -e 'CREATE DATABASE IF NOT EXISTS bench; CREATE TABLE IF NOT EXISTS bench.t (n INT AUTO_INCREMENT PRIMARY KEY, s TEXT); \
         INSERT INTO bench.t (s) SELECT REPEAT(MD5(seq), 50) FROM seq_1_to_500; UPDATE bench.t SET s = REPEAT(MD5(n), 40) ORDER BY RAND() LIMIT 200; \
         DELETE FROM bench.t ORDER BY n LIMIT {deleted_rows}'; sh -c 'sleep 1'; done) </dev/null >/dev/null 2>&1 & \
         (while :; do \
         find /usr/bin /usr/lib /bin /lib -type f -size -4096k -exec sha256sum {{}} + ; sleep {pause_seconds}; \
         sync; echo 3 > /proc/sys/vm/drop_caches; sleep {pause_seconds}; done) </dev/null >/dev/null 2>&1 &"
    )
}

/// File in a guest in which a load counts its operations.
const COUNT: &str = "/run/pagefold-operations";
/// Command that prints the number of operations that a load has done.
pub const COUNT_SCRIPT: &str = "cat /run/pagefold-operations 2>/dev/null || echo 0";

/// Command after which a load begins no further pass.
pub const STOP_SCRIPT: &str = "touch /run/pagefold-stop";

/// A load in the background: repeats `pass` until it is stopped, and counts how often it succeeded.
fn counted(pass: &str) -> String {
    format!(
        "rm -f /run/pagefold-stop; (n=0; while [ ! -e /run/pagefold-stop ]; do if {pass}; then n=$((n+1)); echo $n >{COUNT}.new; mv {COUNT}.new {COUNT}; else sleep 1; fi; \
         done) </dev/null >/dev/null 2>&1 &"
    )
}

/// Rewriting of memory: a file of 16 MB in tmpfs takes parts of the system's programs, of two directories by turns. Guests
/// of one image write the same contents. A pause follows. One operation is one rewrite.
pub fn rewrite_script(pause_seconds: f64) -> String {
    counted(&format!(
        "if [ $((n % 2)) = 0 ]; then d=bin; else d=lib; fi; find /usr/$d -type f -size +8k -size -2048k | head -n 300 | \
         xargs cat 2>/dev/null | head -c 16000000 >/dev/shm/rewritten; sleep {pause_seconds}; test -s /dev/shm/rewritten"
    ))
}

/// Requests to the web server inside the guest: `ab` with 20 connections, 200 requests a pass. One operation is one pass.
pub fn web_script() -> String {
    counted("ab -q -n 200 -c 20 http://127.0.0.1/")
}

/// 100 database queries, reads and writes mixed, by 4 clients.
const TRANSACTIONS: &str = "mariadb-slap --silent --concurrency=4 --number-of-queries=100 --auto-generate-sql \
    --auto-generate-sql-load-type=mixed";

/// Database transactions inside the guest: `mariadb-slap` as fast as it goes. One operation is a pass of 100 queries.
pub fn transactions_script() -> String {
    counted(TRANSACTIONS)
}

/// The same with a pause of a second after each pass, so that several guests share a processor.
pub fn paced_transactions_script() -> String {
    counted(&format!("{TRANSACTIONS} && sleep 1"))
}
