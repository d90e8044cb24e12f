# An application that is warmed up: modules, and data that it has loaded. Words: number of containers to fork, pages of data, and, if that
# number is 0, the file that says when it is ready.
import ctypes, os, random, signal, sys
import argparse, asyncio, decimal, difflib, email.message, http.server, json, logging, tarfile, unittest, urllib.request, xml.dom.minidom

count, pages = int(sys.argv[1]), int(sys.argv[2])
made = random.Random(1)
data = [made.randbytes(4096) for _ in range(pages)]

if count == 0:
    open(sys.argv[3], "w").close()
    signal.pause()

libc = ctypes.CDLL(None, use_errno=True)
# Mounts, host name, System V IPC, pids, network.
NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
MS_REC_AND_PRIVATE = 0x4000 | 0x40000


def must(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def say(text):
    os.write(1, (text + "\n").encode())


def rest():
    # Until the end of whoever has started all this.
    while os.read(0, 1):
        pass
    os._exit(0)


def contain():
    must(libc.unshare(NAMESPACES))
    ready, tell = os.pipe()
    inside = os.fork()
    if inside == 0:
        must(libc.mount(None, b"/", None, MS_REC_AND_PRIVATE, None))
        must(libc.mount(b"proc", b"/proc", b"proc", 0, None))
        os.write(tell, b"!")
        rest()
    os.close(tell)
    say(f"ready {inside}" if os.read(ready, 1) else "failed")


say("warm")
os.read(0, 1)
for _ in range(count):
    between = os.fork()
    if between == 0:
        try:
            contain()
        except OSError as why:
            say(f"failed: {why}")
        os._exit(0)
    os.waitpid(between, 0)
rest()
