//! Work for guests of a bench or a test: shell commands to run in a VM.

/// Shell commands that keep page cache, database and processes changing, in the background, until the guest ends.
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

/// Script of a guest that has only a kernel and busybox: it keeps memory changing, in the background, until the guest
/// ends. Each turn installs the guest's programs once more (the last 12 copies stay), packs and unpacks them, computes
/// digests, and sorts a list; the next turn overwrites the results. Contents are the same in all guests of an image,
/// except for 64 KiB a turn. A turn ends with `pause_seconds`. [`TURNS_SCRIPT`] prints the number of turns so far.
pub fn in_memory_script(pause_seconds: u64) -> String {
    format!(
        "(n=0; s=/tmp/scratch; mkdir -p $s; while :; do n=$((n + 1)); d=/tmp/work/$((n % 12)); rm -rf $d; mkdir -p $d; \
         cp /bin/busybox /modules/* $d/; cat $d/* | gzip -1 >$s/packed; head -c 65536 /dev/urandom >$d/own; \
         gunzip -c $s/packed | sha256sum >$s/digest; seq 1 20000 | sort -r >$s/sorted; echo $n >/tmp/turns; sleep {pause_seconds}; done) \
         </dev/null >/dev/null 2>&1 &"
    )
}

/// Script of a guest with the image `debian`: it works in the background until the guest ends. Each turn installs a
/// package, runs tests, compiles, and has a database answer 100 queries; it ends with `pause_seconds`. [`TURNS_SCRIPT`]
/// prints the number of turns so far. A turn in which a step fails does not count.
///
/// | work | by | because the image has |
/// |---|---|---|
/// | package | `dpkg -i` of a package that the guest has packed of parts of Perl's library | no packages in its cache |
/// | tests | `prove`: each of eight loads a module | no Python, and no tests of Perl's own |
/// | compiler | a step of [`build_script`] | no compiler of C |
/// | database | `mariadb-slap` | no sysbench |
pub fn daily_script(pause_seconds: u64) -> String {
    format!(
        "(PATH=/usr/sbin:/usr/bin:/sbin:/bin; w=/var/tmp/work; {SOURCES_SCRIPT}; {PACKAGE_AND_TESTS}; n=0; \
         while :; do k=$((n % {BUILD_STEPS} + 1)); dpkg -i $w/work.deb && prove $w/t && \
         (cd /usr/share/perl/5.*.* && {BUILD_STEP}) && {TRANSACTIONS} && n=$((n + 1)) && echo $n >/tmp/turns; \
         sleep {pause_seconds}; done) </dev/null >/dev/null 2>&1 &"
    )
}

/// Commands that make the package and the tests of [`daily_script`], in the directory `$w`.
const PACKAGE_AND_TESTS: &str = "mkdir -p $w/t $w/tree/DEBIAN $w/tree/opt/work; \
    (cd /usr/share/perl/5.*.* && cp -r CPAN ExtUtils Module Pod $w/tree/opt/work/); \
    printf '%s\\n' 'Package: pagefold-work' 'Version: 1' 'Architecture: all' 'Maintainer: Nobody <nobody@localhost>' \
    'Description: work of a bench' >$w/tree/DEBIAN/control; dpkg-deb -Zgzip -z1 --root-owner-group -b $w/tree $w/work.deb; \
    for m in Digest::SHA Encode File::Temp IO::Socket JSON::PP Math::BigInt Pod::Text Text::Wrap; do \
    echo \"use Test::More tests => 1; use_ok(q($m));\" >$w/t/$m.t; done";

/// Command that prints the number of turns that [`in_memory_script`] or [`daily_script`] has made.
pub const TURNS_SCRIPT: &str = "cat /tmp/turns";

/// File in a guest in which a load counts its operations.
const COUNT: &str = "/run/pagefold-operations";
/// Command that prints the number of operations that a load has done.
pub const COUNT_SCRIPT: &str = "cat /run/pagefold-operations 2>/dev/null || echo 0";

/// Command after which a load begins no further pass.
pub const STOP_SCRIPT: &str = "touch /run/pagefold-stop";

/// A command, left to run in the background as the guest's load. Operations that were counted before are forgotten.
pub fn in_background(command: &str) -> String {
    format!("rm -f {COUNT} /run/pagefold-stop; ({command}) </dev/null >/dev/null 2>&1 &")
}

/// A load in the background: repeats `pass` until it is stopped, and counts how often it succeeded.
fn counted(pass: &str) -> String {
    in_background(&format!(
        "n=0; while [ ! -e /run/pagefold-stop ]; do if {pass}; then n=$((n+1)); echo $n >{COUNT}.new; mv {COUNT}.new {COUNT}; else sleep 1; fi; done"
    ))
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

/// A web server with files: `ab` with one connection, 50 requests, and 300 of the system's files at random, which are read. One operation is
/// one pass.
pub fn web_and_files_script() -> String {
    counted(
        "ab -q -n 50 -c 1 http://127.0.0.1/ && find /usr/lib /usr/share -type f -size -512k | shuf -n 300 | xargs cat >/dev/null 2>&1",
    )
}

/// 100 database queries, reads and writes mixed, by 4 clients.
const TRANSACTIONS: &str = "mariadb-slap --silent --concurrency=4 --number-of-queries=100 --auto-generate-sql \
    --auto-generate-sql-load-type=mixed";

/// Database transactions inside the guest: `mariadb-slap` as fast as it goes. One operation is a pass of 100 queries.
pub fn transactions_script() -> String {
    counted(TRANSACTIONS)
}

/// As [`transactions_script`], with a pause of a second after each pass, so that several guests share a processor.
pub fn paced_transactions_script() -> String {
    counted(&format!("{TRANSACTIONS} && sleep 1"))
}

/// Rows of the table that [`TABLE_SCRIPT`] makes.
const ROWS: u32 = 10_000;
/// Number of rows in a range that a transaction reads.
const RANGE: u32 = 100;
/// Number of point selects in a transaction, or in an operation of [`Timed::PointSelect`].
const SELECTS: u32 = 10;
/// Number of steps of a whole build.
pub const BUILD_STEPS: u32 = 8;
/// Modules and parts that [`SOURCES_SCRIPT`] prepares, one of each a step.
const MOST_STEPS: u32 = 12;

/// Command that makes the table of [`Timed::ReadWrite`] and [`Timed::PointSelect`]. Each guest's table has other
/// contents. The database's log is flushed once a second, so that a commit does not wait for the host's disk.
pub const TABLE_SCRIPT: &str = "salt=$(cat /proc/sys/kernel/random/boot_id); mariadb -e \"SET GLOBAL innodb_flush_log_at_trx_commit = 2; \
    CREATE DATABASE IF NOT EXISTS study; USE study; CREATE OR REPLACE TABLE t (id INT PRIMARY KEY, k INT, c CHAR(96), KEY (k)); \
    INSERT INTO t SELECT seq, seq * 7 % 10000, REPEAT(MD5(CONCAT('$salt', seq)), 3) FROM seq_1_to_10000\"";

/// Command that prepares builds: the sources' names, divided into parts, and the modules to compile.
pub const SOURCES_SCRIPT: &str = "mkdir -p /var/tmp/build && cd /usr/share/perl/5.*.* && \
    find . -type f | LC_ALL=C sort | awk '{ print >(\"/var/tmp/build/part-\" NR % 12 + 1) }' && \
    find . -name '*.pm' -size +8k -size -24k | LC_ALL=C sort | head -n 12 >/var/tmp/build/modules";

/// Command that makes free memory of the guest resident and zero: it fills nine tenths of it with zeros, and frees
/// them.
pub const ZEROS_SCRIPT: &str = "sync; echo 3 >/proc/sys/vm/drop_caches; mount -t tmpfs -o size=100% none /mnt && \
    head -c $(($(awk '/^MemFree/ { print $2 }' /proc/meminfo) * 9 / 10))K /dev/zero >/mnt/zeros && umount /mnt";

/// Command that fills an array of 256 MB, first with equal pages, then with pages that all differ. Then it ends, and
/// the memory is free again.
pub const ARRAY_SCRIPT: &str = "perl -e 'my ($n, $a, $p) = (62500, \"\", \"\\1\" x 4096); vec($a, $n * 4096 - 1, 8) = 1; \
    substr($a, $_ * 4096, 4096, $p) for 0 .. $n - 1; substr($a, $_ * 4096, 8, pack \"Q\", $_ + 1) for 0 .. $n - 1; \
    length $a == $n * 4096 or die'";

/// Command that fills an array of three quarters of the available memory, first with equal pages, then with pages that
/// all differ. Then it ends, and the memory is free again. It prints the number of pages of the array.
pub const HOG_SCRIPT: &str = "perl -e 'open my $m, \"<\", \"/proc/meminfo\" or die; my ($kb) = join(\"\", <$m>) =~ /MemAvailable: *(\\d+)/ or die; \
    my ($n, $a, $p) = (int($kb / 4 * 3 / 4), \"\", \"\\1\" x 4096); vec($a, $n * 4096 - 1, 8) = 1; \
    substr($a, $_ * 4096, 4096, $p) for 0 .. $n - 1; substr($a, $_ * 4096, 8, pack \"Q\", $_ + 1) for 0 .. $n - 1; \
    length $a == $n * 4096 or die; print $n'";

/// Command that wakes an idle guest with a kernel and busybox: it fills 128 MiB of its memory with pages that nobody else has.
pub const WAKE_SCRIPT: &str = "head -c 134217728 /dev/urandom >/woken && test $(wc -c </woken) = 134217728";

/// The disk that is plugged into a guest for [`Timed::RandomReads`], [`word_count_script`] and [`reads_script`].
const DATA: &str = "/dev/vdb";
/// Command that succeeds when the disk is there.
pub const DATA_SCRIPT: &str = "test -b /dev/vdb";
/// Text that one operation of [`word_count_script`] counts, in MiB. A short load is to have tens of them.
const TEXT_MIB: u32 = 2;
/// Directory of [`Timed::DiskFiles`].
const DISK_FILES: &str = "/var/tmp/files";
/// Statement of Perl that flushes a file to the disk.
const FLUSH: &str = "$f->flush; $f->sync or die;";
/// Size of a random read: 64 KB.
const READ: u32 = 65_536;

/// A load of a fixed time, or of fixed work. It measures itself inside its guest, by the guest's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timed {
    /// Two database clients. A transaction has ten point selects, four ranges and two updates.
    ReadWrite,
    /// Two database clients with ten point selects in each operation.
    PointSelect,
    /// `ab` with four connections.
    Web,
    /// `ab` with this number of connections, for the time.
    Connections(u32),
    /// Files in tmpfs: written, looked at, read, extended, renamed, removed.
    Files,
    /// The same with files on the disk. Each is flushed to it before it is read.
    DiskFiles,
    /// So many files as in [`Self::DiskFiles`], in the time that they take.
    FixedDiskFiles(u32),
    /// Computation in blocks of 10,000 steps.
    Compute,
    /// Forks whose child ends at once.
    Fork,
    /// Forks whose child becomes a program that ends at once.
    Exec,
    /// Reads of 64 KB at random places of a disk of its own.
    RandomReads,
    /// A build of this number of steps, see [`build_script`].
    Build(u32),
}

impl Timed {
    /// A command that prints three numbers: operations, their rate, and the 99th percentile of their time in milliseconds. The
    /// rate is a second's; of builds, an hour's. A percentile of 0 is not known. A build takes the time that it takes.
    pub fn script(self, seconds: u32) -> String {
        match self {
            Self::ReadWrite => database_clients(&transaction(), seconds),
            Self::PointSelect => database_clients(&selects(), seconds),
            Self::Web => web(4, seconds),
            Self::Connections(connections) => web(connections, seconds),
            Self::Files => files("/dev/shm/files", "", &until(seconds)),
            Self::DiskFiles => files(DISK_FILES, FLUSH, &until(seconds)),
            Self::FixedDiskFiles(count) => files(DISK_FILES, FLUSH, &format!("$n < {count} * 6")),
            Self::Compute => {
                repeated("", "for (1 .. 10000) { $x = ($x * 1103515245 + 12345) % 2147483648 } $n += 1", seconds)
            }
            Self::Fork => repeated("-MPOSIX=_exit", &child("_exit 0"), seconds),
            Self::Exec => repeated("-MPOSIX=_exit", &child("exec \"/bin/true\""), seconds),
            Self::RandomReads => random_reads(seconds),
            Self::Build(steps) => format!(
                "from=$(date +%s%N); {}; took=$((($(date +%s%N) - from) / 1000000)); \
                 echo {steps} $took | awk '{{ print $1, 3600000 / $2, 0 }}'",
                build_script(steps)
            ),
        }
    }
}

/// A run of `ab` for this many seconds.
fn web(connections: u32, seconds: u32) -> String {
    format!(
        "ab -q -t {seconds} -n 50000 -c {connections} http://127.0.0.1/ 2>/dev/null | \
         awk '/^Complete requests/ {{ n = $3 }} /^Requests per second/ {{ rate = $4 }} /^ *99%/ {{ ms = $2 }} END {{ print n, rate, ms }}'"
    )
}

/// A Perl program that repeats statements for a time. The statements count themselves in `$n`.
fn repeated(options: &str, statements: &str, seconds: u32) -> String {
    format!(
        "perl -MTime::HiRes=time {options} -e 'my ($n, $x, $begin) = (0, 1, time); while ({}) {{ {statements} }} \
         print $n, \" \", $n / (time - $begin), \" 0\\n\"'",
        until(seconds)
    )
}

/// The condition of a Perl loop that goes on for this many seconds.
fn until(seconds: u32) -> String {
    format!("time - $begin < {seconds}")
}

/// Perl statements that fork a child, which does something, and wait for its end.
fn child(does: &str) -> String {
    format!("my $p = fork; defined $p or die; if (!$p) {{ {does}; _exit 1 }} waitpid $p, 0; $? == 0 or die; $n += 1")
}

/// Rates in a guest, a second, each with its name: see [`process_rates_script`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates(pub [(&'static str, f64); 3]);

impl Rates {
    /// Reads what [`process_rates_script`] prints. `None` if that is something else.
    pub fn of(printed: &str) -> Option<Self> {
        let numbers: Vec<f64> = printed.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let &[fork, exec, shell] = &numbers[..] else { return None };
        Some(Self([("fork", fork), ("exec", exec), ("shell", shell)]))
    }
}

/// Command that prints three rates a second: forks whose child ends at once, programs that end at once, and shells that run
/// one. Each is measured for some seconds, by the guest's clock.
pub fn process_rates_script(seconds: u32) -> String {
    format!(
        "perl -MTime::HiRes=time -MPOSIX=_exit -e '\
         sub rate {{ my ($n, $begin) = (0, time); while (time - $begin < {seconds}) {{ \
         my $p = fork; defined $p or die; if (!$p) {{ $_[0]->(); _exit 1 }} waitpid $p, 0; $? == 0 or die; $n += 1 }} \
         print $n / (time - $begin), \" \" }} \
         rate(sub {{ _exit 0 }}); rate(sub {{ exec \"/bin/true\" }}); rate(sub {{ exec \"/bin/sh\", \"-c\", \"/bin/true; :\" }})'"
    )
}

/// Computation of fixed work: prints the seconds that it took, by the guest's clock.
pub const COMPUTE_SCRIPT: &str = "perl -MTime::HiRes=time -e 'my ($b, $x) = (time, 1); \
    for (1 .. 1200000) { $x = ($x * 1103515245 + 12345) % 2147483648 } print time - $b'";

/// A loop that counts, for ever. It is a load that makes a guest busy. One operation is counting to a thousand.
pub fn spin_script() -> String {
    counted("{ i=0; while [ $i -lt 1000 ]; do i=$((i+1)); done; }")
}

/// A build of Perl's own library, from the names of [`SOURCES_SCRIPT`]. Each step compiles a module, writes it out again from
/// what the compiler made of it, and packs a part of the sources. It counts its steps. It ends with the first that fails, or when
/// the load is to stop.
pub fn build_script(steps: u32) -> String {
    format!(
        "set -e; cd /usr/share/perl/5.*.*; for k in $(seq {steps}); do [ ! -e /run/pagefold-stop ]; {BUILD_STEP} || exit 1; \
         echo $k >{COUNT}.new; mv {COUNT}.new {COUNT}; done"
    )
}

/// Step `k` of a build, in the directory of the sources.
const BUILD_STEP: &str = "m=$(sed -n ${k}p /var/tmp/build/modules) && \
    perl -MO=Deparse $m >/var/tmp/build/$k.out 2>/dev/null && \
    tar -cf - -T /var/tmp/build/part-$k | gzip -1 >/var/tmp/build/$k.tgz";

/// Script that makes one build after the other. One operation is a step.
pub fn builds_script() -> String {
    counted(&format!("( cd /usr/share/perl/5.*.* && k=$((n % {BUILD_STEPS} + 1)) && {BUILD_STEP} )"))
}

/// Steps of builds in a random order, of each guest's own. One operation is a step.
pub fn random_builds_script() -> String {
    counted(&format!(
        "( cd /usr/share/perl/5.*.* && k=$(($(od -An -N2 -tu2 /dev/urandom) % {MOST_STEPS} + 1)) && {BUILD_STEP} )"
    ))
}

/// Operations on files on the disk without an end, see [`Timed::DiskFiles`]. One operation is a second of them.
pub fn disk_files_script() -> String {
    counted(&format!("( {} )", files(DISK_FILES, FLUSH, &until(1))))
}

/// The load of [`paced_transactions_script`], and beside it reads at random places of the disk, which are not counted.
pub fn transactions_and_reads_script() -> String {
    format!(
        "{} (perl -e 'open my $f, \"<\", \"{DATA}\" or die; my $blocks = int(sysseek($f, 0, 2) / {READ}); \
         until (-e \"/run/pagefold-stop\") {{ sysseek $f, int(rand $blocks) * {READ}, 0; sysread $f, my $read, {READ}; \
         select undef, undef, undef, 0.01 }}') </dev/null >/dev/null 2>&1 &",
        paced_transactions_script()
    )
}

/// Steps of a build in random order, with a pause of some seconds after each. One operation is a step.
pub fn paused_random_builds_script(pause_seconds: u64) -> String {
    counted(&format!(
        "( cd /usr/share/perl/5.*.* && k=$(shuf -i 1-{BUILD_STEPS} -n 1) && {BUILD_STEP} ) && sleep {pause_seconds}"
    ))
}

/// Operations on files in tmpfs, see [`Timed::Files`]. One operation is a second of them.
pub fn files_script() -> String {
    counted(&format!("( {} )", files("/dev/shm/files", "", &until(1))))
}

/// Compression of 4 MB of the system's libraries, another part each time. One operation is one part.
pub fn compress_script() -> String {
    counted(
        "( cat /usr/lib/*/lib*.so.* 2>/dev/null | tail -c +$((n % 8 * 1000000 + 1)) | head -c 4000000 | gzip -9 >/dev/shm/packed; \
         test -s /dev/shm/packed )",
    )
}

/// Processes that start and end: 50 forks, and 50 programs. One operation is one pass.
pub fn processes_script() -> String {
    counted("( i=0; while [ $i -lt 50 ]; do ( : ); /bin/true; i=$((i+1)); done )")
}

/// Statements of an awk program that print the SQL of a transaction. Each of the two clients (`c`) updates rows of its
/// own.
fn transaction() -> String {
    let range = |columns: &str, order: &str| {
        format!("printf \"SELECT {columns} FROM t WHERE id BETWEEN %d AND %d{order}; \", f, f + {};", RANGE - 1)
    };
    format!(
        "printf \"BEGIN; \"; {} f = 1 + int(rand() * {}); {}{}{}{}w = 2 * int(rand() * {half}) + c; \
         printf \"UPDATE t SET k = k + 1 WHERE id = %d; UPDATE t SET c = REPEAT(MD5(RAND()), 3) WHERE id = %d; COMMIT; \", w, w;",
        selects(),
        ROWS - RANGE,
        range("c", ""),
        range("SUM(k)", ""),
        range("c", " ORDER BY c"),
        range("DISTINCT c", " ORDER BY c"),
        half = ROWS / 2,
    )
}

/// Statements of an awk program that print the SQL of point selects.
fn selects() -> String {
    format!("for (i = 0; i < {SELECTS}; i++) printf \"SELECT c FROM t WHERE id = %d; \", 1 + int(rand() * {ROWS});")
}

/// Two clients that send what an awk program writes, for a time. After each operation they ask the server's clock.
fn database_clients(operation: &str, seconds: u32) -> String {
    const TIMES: &str = "/dev/shm/times-1 /dev/shm/times-2";
    let program =
        format!("BEGIN {{ srand(c); for (;;) {{ {operation} print \"SELECT UNIX_TIMESTAMP(SYSDATE(6));\" }} }}");
    format!(
        "for c in 1 2; do (awk -v c=$c '{program}' 2>/dev/null | timeout {seconds} mariadb -N -n study | grep -E '^[0-9]+[.][0-9]+$' >/dev/shm/times-$c) & \
         done; wait; rate=$(awk 'FNR == 1 {{ first = $1 }} FNR > 1 {{ n[FILENAME] = FNR - 1; s[FILENAME] = $1 - first }} \
         END {{ for (f in n) rate += n[f] / s[f]; printf \"%.3f\", rate }}' {TIMES}); \
         awk 'FNR > 1 {{ print ($1 - last) * 1000 }} {{ last = $1 }}' {TIMES} | sort -n | \
         awk -v rate=$rate '{{ ms[NR] = $1 }} END {{ print NR, rate, ms[int(NR * 0.99 + 0.99)] + 0 }}'"
    )
}

/// Reads at random places of the disk, for a time.
fn random_reads(seconds: u32) -> String {
    format!(
        "perl -MTime::HiRes=time -e '\
         open my $f, \"<\", \"{DATA}\" or die; my $blocks = int(sysseek($f, 0, 2) / {READ}); my ($n, $begin) = (0, time); \
         while (time - $begin < {seconds}) {{ sysseek $f, int(rand $blocks) * {READ}, 0; \
         sysread($f, my $read, {READ}) == {READ} or die; $n += 1 }} \
         print $n, \" \", $n / (time - $begin), \" 0\\n\"'"
    )
}

/// Reads at random places of the disk until the load is to stop. One operation is a read of 64 KB.
pub fn reads_script() -> String {
    in_background(&format!(
        "perl -e 'open my $f, \"<\", \"{DATA}\" or die; my $blocks = int(sysseek($f, 0, 2) / {READ}); my $n = 0; \
         until (-e \"/run/pagefold-stop\") {{ for (1 .. 20) {{ sysseek $f, int(rand $blocks) * {READ}, 0; \
         sysread($f, my $read, {READ}) == {READ} or die }} $n += 20; open my $c, \">\", \"{COUNT}.new\"; print $c \"$n\\n\"; close $c; \
         rename \"{COUNT}.new\", \"{COUNT}\" }}'"
    ))
}

/// Counts the words of a text of `mib` MiB on the disk, part by part, again and again. One operation is a part of 2 MiB.
pub fn word_count_script(mib: u32) -> String {
    let parts = mib / TEXT_MIB;
    counted(&format!(
        "dd if={DATA} bs=1M skip=$((n % {parts} * {TEXT_MIB})) count={TEXT_MIB} 2>/dev/null | \
         awk '{{ for (i = 1; i <= NF; i++) words[$i]++ }} END {{ for (w in words) sum += words[w]; exit !(sum > 1000) }}'"
    ))
}

/// Operations on files of 64 KB in a directory, while a condition holds. Six operations a file.
fn files(dir: &str, flush: &str, condition: &str) -> String {
    format!(
        "mkdir -p {dir} && cd {dir} && perl -MTime::HiRes=time -MIO::Handle -e '\
         my $bytes = join \"\", map {{ chr int rand 256 }} 1 .. 65536; my ($n, $begin) = (0, time); \
         while ({condition}) {{ \
         open my $f, \">\", \"a$n\" or die; print $f $bytes; {flush} close $f; -s \"a$n\" == 65536 or die; \
         open $f, \"<\", \"a$n\" or die; read $f, my $read, 65536; close $f; $read eq $bytes or die; \
         open $f, \">>\", \"a$n\" or die; print $f substr $bytes, 0, 16384; close $f; \
         rename \"a$n\", \"b$n\" or die; unlink \"b$n\" or die; $n += 6 }} \
         print $n, \" \", $n / (time - $begin), \" 0\\n\"'"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_three_numbers() {
        assert_eq!(Rates::of("835.5 149 35.25 "), Some(Rates([("fork", 835.5), ("exec", 149.0), ("shell", 35.25)])));
        assert_eq!(Rates::of("835.5 149"), None);
        assert_eq!(Rates::of("835.5 149 x"), None);
    }
}
