// Command v1_27 reads the kubelet's state files with the code of the first
// release that had dynamic resource allocation state. See ../README.md.
package main

import (
	"github.com/davecgh/go-spew/spew"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager/checksum"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"

	"devlet.test/interop/checkpoints/frame"
)

const claimsFile = "dra_manager_state"

func main() {
	quiet()
	frame.Main(frame.Oracle{
		Release: "v1.27.16",
		Answer: map[byte]func([]byte) any{
			'd': readDevices,
			'm': readClaims,
			'p': readResponse,
		},
		Hashed: map[byte]func([]byte) ([]byte, error){
			'd': hashedDevices,
			'1': hashedDevicesV1,
			'm': hashedClaims,
		},
	})
}

// forHash prints as this release's pkg/util/hash does.
func forHash(value any) string {
	printer := spew.ConfigState{Indent: " ", SortKeys: true, DisableMethods: true, SpewKeys: true}
	return printer.Sprintf("%#v", value)
}

type claims struct {
	// Error is the text with which the kubelet refuses to start.
	Error string `json:"error"`
	// Decoded is true if the JSON is valid, regardless of the checksum.
	Decoded          bool                     `json:"decoded"`
	StoredChecksum   uint64                   `json:"storedChecksum"`
	ComputedChecksum uint64                   `json:"computedChecksum"`
	Version          string                   `json:"version"`
	Claims           state.ClaimInfoStateList `json:"claims"`
	ClaimsNil        bool                     `json:"claimsNil"`
	Cache            map[string]int           `json:"cache"`
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
		a.Claims, a.ClaimsNil = cp.Entries, cp.Entries == nil
		again := state.NewDRAManagerCheckpoint()
		again.Entries = cp.Entries
		a.Written = frame.Wrote(again.MarshalCheckpoint())
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

func hashedClaims(data []byte) ([]byte, error) {
	cp := state.NewDRAManagerCheckpoint()
	err := cp.UnmarshalCheckpoint(data)
	cp.Checksum = 0
	return []byte(forHash(cp)), err
}
