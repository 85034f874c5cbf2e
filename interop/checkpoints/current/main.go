// Command current reads the kubelet's state files with the code of a recent
// release. See ../README.md.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"hash/crc32"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager/checksum"
	checkpointerrors "k8s.io/kubernetes/pkg/kubelet/checkpointmanager/errors"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/checkpoint"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"
	"k8s.io/utils/dump"

	"devlet.test/interop/checkpoints/frame"
)

const (
	devicesFile = "kubelet_internal_checkpoint"
	claimsFile  = "dra_manager_state"
)

func main() {
	frame.Main(frame.Oracle{
		Release: "v1.37.1",
		Answer: map[byte]func([]byte) any{
			'd': readDevices,
			'm': readClaims,
			'h': readHealth,
			'p': readResponse,
		},
		Hashed: map[byte]func([]byte) ([]byte, error){
			'd': hashedDevices,
			'm': hashedClaims,
		},
	})
}

// newDevices returns the value that the device manager decodes a file into.
func newDevices() *checkpoint.Data {
	return checkpoint.New(make([]checkpoint.PodDevicesEntry, 0), make(map[string][]string)).(*checkpoint.Data)
}

func readDevices(data []byte) any {
	frame.Put(devicesFile, data)
	manager, err := checkpointmanager.NewCheckpointManager(frame.Dir)
	if err != nil {
		panic(err)
	}
	cp := newDevices()
	err = manager.GetCheckpoint(devicesFile, cp)
	a := frame.Devices{
		Error:   frame.Text(err),
		Decoded: err == nil || errors.Is(err, &checkpointerrors.CorruptCheckpointError{}),
	}
	if !a.Decoded {
		a.Restore()
		return &a
	}
	a.StoredChecksum = uint64(cp.Checksum)
	a.ComputedChecksum = uint64(checksum.New(cp.Data))
	entries, registered := cp.GetData()
	a.Entries, a.EntriesNil = []frame.Entry{}, entries == nil
	a.Registered, a.RegisteredNil = registered, registered == nil
	for _, e := range entries {
		a.Entries = append(a.Entries, frame.Entry{
			PodUID:         e.PodUID,
			ContainerName:  e.ContainerName,
			ResourceName:   e.ResourceName,
			DeviceIDs:      e.DeviceIDs,
			AllocResp:      e.AllocResp,
			AllocRespError: frame.Text(proto.Unmarshal(e.AllocResp, &pluginapi.ContainerAllocateResponse{})),
		})
	}
	a.Written = frame.Wrote(checkpoint.New(entries, registered).MarshalCheckpoint())
	a.Restore()
	return &a
}

func hashedDevices(data []byte) ([]byte, error) {
	cp := newDevices()
	if err := cp.UnmarshalCheckpoint(data); err != nil {
		return nil, err
	}
	return []byte(dump.ForHash(cp.Data)), nil
}

type claims struct {
	// Error is the text with which the kubelet refuses to start.
	Error string `json:"error"`
	// Decoded is true if the outer JSON is valid, regardless of the checksum.
	Decoded          bool                     `json:"decoded"`
	StoredChecksum   uint32                   `json:"storedChecksum"`
	ComputedChecksum uint32                   `json:"computedChecksum"`
	Data             string                   `json:"data"`
	Claims           state.ClaimInfoStateList `json:"claims"`
	Cache            map[string]int           `json:"cache"`
	frame.Written
}

func readClaims(data []byte) any {
	frame.Put(claimsFile, data)
	a := claims{}
	if cp, err := state.NewCheckpoint(nil); err != nil {
		panic(err)
	} else if err := cp.UnmarshalCheckpoint(data); err == nil || errors.Is(err, &checkpointerrors.CorruptCheckpointError{}) {
		a.Decoded = true
		a.StoredChecksum, a.ComputedChecksum, a.Data = cp.Checksum, crc32.ChecksumIEEE([]byte(cp.Data)), cp.Data
	}
	checkpointer, err := state.NewCheckpointer(frame.Dir, claimsFile)
	if err != nil {
		panic(err)
	}
	cp, err := checkpointer.GetOrCreate()
	if err != nil {
		a.Error = "create ResourceClaim cache: GetOrCreate() on checkpoint state: " + err.Error()
		return &a
	}
	list, err := cp.GetClaimInfoStateList()
	if err != nil {
		a.Error = "create ResourceClaim cache: GetEntries() on checkpoint: " + err.Error()
		return &a
	}
	a.Claims = list
	a.Cache = frame.Cache(list, func(c *state.ClaimInfoState) string { return c.Namespace + "/" + c.ClaimName })
	cp, err = state.NewCheckpoint(list)
	if err != nil {
		a.Written = frame.Wrote(nil, err)
		return &a
	}
	a.Written = frame.Wrote(cp.MarshalCheckpoint())
	return &a
}

func hashedClaims(data []byte) ([]byte, error) {
	cp, err := state.NewCheckpoint(nil)
	if err != nil {
		return nil, err
	}
	if err := cp.UnmarshalCheckpoint(data); err != nil && !errors.Is(err, &checkpointerrors.CorruptCheckpointError{}) {
		return nil, err
	}
	return []byte(cp.Data), nil
}

type health struct {
	Error string `json:"error"`
	// Devices is the content of the cache, after an error too: the kubelet
	// continues with the decoded part.
	Devices *state.DevicesHealthMap `json:"devices"`
	frame.Written
}

func readHealth(data []byte) any {
	a := health{Devices: &state.DevicesHealthMap{}}
	a.Error = frame.Text(json.Unmarshal(data, a.Devices))
	a.Written = frame.Wrote(json.Marshal(a.Devices))
	if a.Written.Error != "" {
		a.Devices = nil
	}
	return &a
}

type response struct {
	Error string          `json:"error"`
	JSON  json.RawMessage `json:"json"`
	// Reencoded is the response encoded again, with maps in key order.
	Reencoded []byte `json:"reencoded"`
}

func readResponse(data []byte) any {
	resp := &pluginapi.ContainerAllocateResponse{}
	if err := proto.Unmarshal(data, resp); err != nil {
		return &response{Error: err.Error()}
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(resp)
	if err != nil {
		panic(err)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, text); err != nil {
		panic(err)
	}
	again, err := proto.MarshalOptions{Deterministic: true}.Marshal(resp)
	if err != nil {
		panic(err)
	}
	if again == nil {
		again = []byte{}
	}
	return &response{JSON: compact.Bytes(), Reencoded: again}
}
