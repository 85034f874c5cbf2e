// Package frame is the shared part of all oracles: the request loop on standard
// input and output, the scratch directory, and the format of the answers.
package frame

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"unicode/utf8"
)

// Oracle answers for one release of Kubernetes.
type Oracle struct {
	// Release is the version of k8s.io/kubernetes that answers.
	Release string
	// Answer maps a request kind to the code that answers it.
	Answer map[byte]func(data []byte) any
	// Hashed maps a request kind to the code that returns the hashed text.
	Hashed map[byte]func(data []byte) ([]byte, error)
	// Extra holds further sub-commands of one oracle.
	Extra map[string]func(args []string) error
}

// Dir is the scratch directory for state files. Main sets it.
var Dir string

// Main runs the program: the request loop, or the named sub-command.
func Main(o Oracle) {
	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "oracle:", err)
		os.Exit(1)
	}
}

func run(o Oracle) error {
	base := ""
	if st, err := os.Stat("/dev/shm"); err == nil && st.IsDir() {
		base = "/dev/shm"
	}
	dir, err := os.MkdirTemp(base, "oracle-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	Dir = dir

	args := os.Args[1:]
	if len(args) == 0 {
		return serve(o)
	}
	if extra, ok := o.Extra[args[0]]; ok {
		return extra(args[1:])
	}
	switch {
	case args[0] == "release" && len(args) == 1:
		fmt.Println(o.Release)
		return nil
	case (args[0] == "hashed" || args[0] == "read") && len(args) == 3 && len(args[1]) == 1:
		data, err := os.ReadFile(args[2])
		if err != nil {
			return err
		}
		kind := args[1][0]
		if args[0] == "read" {
			line, err := answer(o, kind, data)
			if err != nil {
				return err
			}
			_, err = os.Stdout.Write(append(line, '\n'))
			return err
		}
		print, ok := o.Hashed[kind]
		if !ok {
			return fmt.Errorf("%s: no hashed form of kind %q", o.Release, kind)
		}
		text, err := print(data)
		if err != nil {
			return err
		}
		_, err = os.Stdout.Write(text)
		return err
	}
	return fmt.Errorf("usage: oracle | oracle release | oracle read KIND FILE | oracle hashed KIND FILE")
}

func serve(o Oracle) error {
	in := bufio.NewReaderSize(os.Stdin, 1<<16)
	out := bufio.NewWriterSize(os.Stdout, 1<<16)
	var head [5]byte
	for {
		if _, err := io.ReadFull(in, head[:]); err != nil {
			if err == io.EOF {
				return nil
			}
			return err
		}
		data := make([]byte, binary.BigEndian.Uint32(head[1:]))
		if _, err := io.ReadFull(in, data); err != nil {
			return err
		}
		line, err := answer(o, head[0], data)
		if err != nil {
			return err
		}
		if _, err := out.Write(line); err != nil {
			return err
		}
		if err := out.WriteByte('\n'); err != nil {
			return err
		}
		// A client may send many requests before it reads: flush only after the
		// last one that has arrived.
		if in.Buffered() < len(head) {
			if err := out.Flush(); err != nil {
				return err
			}
		}
	}
}

// answer does not fail on any data: a panic of the code under test is part of
// the answer.
func answer(o Oracle, kind byte, data []byte) (line []byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			line, err = json.Marshal(map[string]string{"panic": fmt.Sprint(r)})
		}
	}()
	f, ok := o.Answer[kind]
	if !ok {
		return json.Marshal(map[string]string{"unsupported": fmt.Sprintf("%s does not answer kind %q", o.Release, kind)})
	}
	return json.Marshal(f(data))
}

// Put writes data as a state file with this name into Dir.
func Put(name string, data []byte) {
	if err := os.WriteFile(filepath.Join(Dir, name), data, 0o600); err != nil {
		panic(err)
	}
}

// Text returns the text of an error, or an empty string for nil.
func Text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// Written is a file as the code under test would write it. Bytes is set only
// when the file is not valid UTF-8 and so cannot be a JSON string.
type Written struct {
	Text  *string `json:"written"`
	Bytes []byte  `json:"writtenBase64,omitempty"`
	Error string  `json:"writeError,omitempty"`
}

// Wrote returns the result of a write.
func Wrote(data []byte, err error) Written {
	if err != nil {
		return Written{Error: err.Error()}
	}
	text := string(data)
	w := Written{Text: &text}
	if !utf8.Valid(data) {
		w.Bytes = data
	}
	return w
}

// Entry is one entry of a device manager's file.
type Entry struct {
	PodUID         string             `json:"podUID"`
	ContainerName  string             `json:"containerName"`
	ResourceName   string             `json:"resourceName"`
	DeviceIDs      map[int64][]string `json:"deviceIDs"`
	FlatDeviceIDs  []string           `json:"flatDeviceIDs,omitempty"`
	AllocResp      []byte             `json:"allocResp"`
	AllocRespError string             `json:"allocRespError,omitempty"`
}

// Devices is the answer about a device manager's file.
type Devices struct {
	Error string `json:"error"`
	// Decoded is true if the JSON is valid, regardless of the checksum.
	Decoded          bool                `json:"decoded"`
	StoredChecksum   uint64              `json:"storedChecksum"`
	ComputedChecksum uint64              `json:"computedChecksum"`
	Entries          []Entry             `json:"entries"`
	EntriesNil       bool                `json:"entriesNil"`
	Registered       map[string][]string `json:"registered"`
	RegisteredNil    bool                `json:"registeredNil"`
	// Restored holds the indexes of the entries that the kubelet keeps.
	Restored []int `json:"restored"`
	Written
	// V1 is true if the reader of the older format succeeded after the current
	// one had failed. The other fields then describe its result.
	V1 bool `json:"v1,omitempty"`
	// V1Error is the error of the reader of the older format, if it was used.
	V1Error string `json:"v1Error,omitempty"`
	// V1ComputedChecksum is set if the older format was decoded.
	V1ComputedChecksum *uint64 `json:"v1ComputedChecksum,omitempty"`
}

// Restore fills in Restored. An entry with a response that does not decode is
// skipped. A later entry replaces an earlier one of the same pod, container and
// resource. After an error nothing is restored.
func (d *Devices) Restore() {
	d.Restored = []int{}
	if d.Error != "" {
		return
	}
	last := map[[3]string]int{}
	for i, e := range d.Entries {
		if e.AllocRespError == "" {
			last[[3]string{e.PodUID, e.ContainerName, e.ResourceName}] = i
		}
	}
	for i, e := range d.Entries {
		if j, ok := last[[3]string{e.PodUID, e.ContainerName, e.ResourceName}]; ok && i == j {
			d.Restored = append(d.Restored, i)
		}
	}
}

// Cache returns the index of the claim under each key of the kubelet's claim
// cache: a later claim replaces an earlier one.
func Cache[T any](claims []T, key func(*T) string) map[string]int {
	cache := map[string]int{}
	for i := range claims {
		cache[key(&claims[i])] = i
	}
	return cache
}
