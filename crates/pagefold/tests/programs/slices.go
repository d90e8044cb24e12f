// Holds slices of a few contents, lets them rest, checks them, gives some back to the kernel and takes new ones, which
// must hold zeros. With cgo, the runtime maps memory through the C library, but discards it by system calls of its own.
package main

// #include <sys/mman.h>
import "C"

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"os/signal"
	"runtime/debug"
	"strconv"
	"syscall"
	"time"
)

const (
	pageBytes  = 4096
	slicePages = 16
	slices     = 512
	contents   = 16
)

var counted struct {
	Checks   int `json:"checks"`
	Freed    int `json:"freed_slices"`
	Fresh    int `json:"fresh_slices"`
	Programs int `json:"programs"`
}

func fail(format string, words ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", words...)
	os.Exit(1)
}

func word(content, n int) uint64 {
	x := (uint64(content)<<16 | uint64(n)) * 0x9e3779b97f4a7c15
	return x ^ x>>29 | 1
}

func fill(slice []byte, content int) {
	for at := 0; at < len(slice); at += 8 {
		binary.LittleEndian.PutUint64(slice[at:], word(content, at%pageBytes/8))
	}
}

func check(slice []byte, content int) {
	counted.Checks++
	for at := 0; at < len(slice); at += 8 {
		if found := binary.LittleEndian.Uint64(slice[at:]); found != word(content, at%pageBytes/8) {
			fail("content %d: %#x at byte %d of a slice", content, found, at)
		}
	}
}

// A new slice, which must hold zeros.
func fresh() []byte {
	slice := make([]byte, slicePages*pageBytes)
	for at, found := range slice {
		if found != 0 {
			fail("a fresh slice holds %#x at byte %d", found, at)
		}
	}
	counted.Fresh++
	return slice
}

func main() {
	seconds, _ := strconv.Atoi(os.Args[1])
	end := time.Now().Add(time.Duration(seconds) * time.Second)
	// It ends at once when it is told to.
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGTERM)
	var held [slices][]byte
	for time.Now().Before(end) && len(told) == 0 {
		for i := range held {
			if held[i] == nil {
				held[i] = fresh()
				fill(held[i], i%contents)
			}
		}
		// Long enough to be folded.
		time.Sleep(2 * time.Second)
		for i := range held {
			check(held[i], i%contents)
			if rand.Intn(3) == 0 {
				held[i] = nil
				counted.Freed++
			}
		}
		debug.FreeOSMemory()
		if err := exec.Command("/bin/true").Run(); err != nil {
			fail("run /bin/true: %v", err)
		}
		counted.Programs++
		for i := range held {
			if held[i] != nil {
				check(held[i], i%contents)
			}
		}
	}
	json.NewEncoder(os.Stdout).Encode(counted)
}
