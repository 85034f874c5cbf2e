// Command v1_30 (and, from the same source, v1_28) reads the kubelet's state
// files with the code of an older release. See ../README.md.
package main

import (
	"hash/fnv"
	"strings"

	"k8s.io/apimachinery/pkg/util/dump"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager/checksum"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"

	"devlet.test/interop/checkpoints/frame"
)

const claimsFile = "dra_manager_state"

func main() {
	quiet()
	frame.Main(frame.Oracle{
		Release: release,
		Answer: map[byte]func([]byte) any{
			'd': readDevices,
			'm': readClaims,
			'p': readResponse,
		},
		Hashed: map[byte]func([]byte) ([]byte, error){
			'd': hashedDevices,
			'1': hashedDevicesV1,
			'm': hashedClaims,
			'0': hashedClaimsWithoutHandles,
		},
		Extra: extra,
	})
}

func forHash(value any) string { return dump.ForHash(value) }

type claims struct {
	// Error is the text with which the kubelet refuses to start.
	Error string `json:"error"`
	// Decoded is true if the JSON is valid, regardless of the checksum.
	Decoded          bool   `json:"decoded"`
	StoredChecksum   uint64 `json:"storedChecksum"`
	ComputedChecksum uint64 `json:"computedChecksum"`
	// WithoutHandles is the second accepted checksum: that of the format before
	// ResourceHandles.
	WithoutHandles uint64                   `json:"computedChecksumWithoutResourceHandles"`
	Version        string                   `json:"version"`
	Claims         state.ClaimInfoStateList `json:"claims"`
	ClaimsNil      bool                     `json:"claimsNil"`
	Cache          map[string]int           `json:"cache"`
	frame.Written
}

func readClaims(data []byte) any {
	frame.Put(claimsFile, data)
	a := claims{}
	cp := state.NewDRAManagerCheckpoint()
	if err := cp.UnmarshalCheckpoint(data); err == nil {
		a.Decoded = true
		a.Version = cp.Version
		a.StoredChecksum = uint64(cp.Checksum)
		cp.Checksum = 0
		a.ComputedChecksum = uint64(checksum.New(cp))
		sum := fnv.New32a()
		sum.Write([]byte(printWithoutHandles(cp)))
		a.WithoutHandles = uint64(sum.Sum32())
		a.Claims, a.ClaimsNil = cp.Entries, cp.Entries == nil
		again := state.NewDRAManagerCheckpoint()
		again.Entries = cp.Entries
		a.Written = frame.Wrote(again.MarshalCheckpoint())
		// The code under test must agree with the sums reported here.
		for _, sum := range []uint64{a.ComputedChecksum, a.WithoutHandles} {
			cp.Checksum = checksum.Checksum(sum)
			if err := cp.VerifyChecksum(); err != nil {
				panic(err)
			}
		}
	}
	checkpointer, err := state.NewCheckpointState(frame.Dir, claimsFile)
	if err != nil {
		panic(err)
	}
	list, err := checkpointer.GetOrCreate()
	if err != nil {
		a.Error = "error calling GetOrCreate() on checkpoint state: " + err.Error()
		return &a
	}
	a.Cache = frame.Cache(list, func(c *state.ClaimInfoState) string { return c.ClaimName + c.Namespace })
	return &a
}

func decodeClaims(data []byte) (*state.DRAManagerCheckpoint, error) {
	cp := state.NewDRAManagerCheckpoint()
	err := cp.UnmarshalCheckpoint(data)
	cp.Checksum = 0
	return cp, err
}

func hashedClaims(data []byte) ([]byte, error) {
	cp, err := decodeClaims(data)
	return []byte(forHash(cp)), err
}

func hashedClaimsWithoutHandles(data []byte) ([]byte, error) {
	cp, err := decodeClaims(data)
	return []byte(printWithoutHandles(cp)), err
}

// printWithoutHandles returns the hashed text of the second checksum.
func printWithoutHandles(cp *state.DRAManagerCheckpoint) string {
	old := &state.DRAManagerCheckpointWithoutResourceHandles{
		// Not the version of the file.
		Version: state.NewDRAManagerCheckpoint().Version,
		// Never nil.
		Entries: state.ClaimInfoStateListWithoutResourceHandles{},
	}
	for _, c := range cp.Entries {
		old.Entries = append(old.Entries, state.ClaimInfoStateWithoutResourceHandles{
			DriverName: c.DriverName, ClassName: c.ClassName, ClaimUID: c.ClaimUID, ClaimName: c.ClaimName,
			Namespace: c.Namespace, PodUIDs: c.PodUIDs, CDIDevices: c.CDIDevices,
		})
	}
	text := forHash(old)
	text = strings.Replace(text, "DRAManagerCheckpointWithoutResourceHandles", "DRAManagerCheckpoint", 1)
	return strings.Replace(text, "ClaimInfoStateListWithoutResourceHandles", "ClaimInfoStateList", 1)
}
