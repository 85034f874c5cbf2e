// Command v1_19 reads the device manager's state file with the code of the
// last release that wrote it without NUMA nodes. See ../README.md.
package main

import (
	"encoding/json"

	"github.com/davecgh/go-spew/spew"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager/checksum"
	checkpointerrors "k8s.io/kubernetes/pkg/kubelet/checkpointmanager/errors"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/checkpoint"

	"devlet.test/interop/checkpoints/frame"
)

const devicesFile = "kubelet_internal_checkpoint"

func main() {
	frame.Main(frame.Oracle{
		Release: "v1.19.16",
		Answer:  map[byte]func([]byte) any{'d': readDevices, 'p': readResponse},
		Hashed:  map[byte]func([]byte) ([]byte, error){'d': hashedDevices},
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
		Decoded: err == nil || err == checkpointerrors.ErrCorruptCheckpoint,
	}
	if a.Decoded {
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
				FlatDeviceIDs:  e.DeviceIDs,
				AllocResp:      e.AllocResp,
				AllocRespError: frame.Text((&pluginapi.ContainerAllocateResponse{}).Unmarshal(e.AllocResp)),
			})
		}
		a.Written = frame.Wrote(checkpoint.New(entries, registered).MarshalCheckpoint())
	}
	a.Restore()
	return &a
}

// hashedDevices prints as this release's pkg/util/hash does.
func hashedDevices(data []byte) ([]byte, error) {
	cp := newDevices()
	err := cp.UnmarshalCheckpoint(data)
	printer := spew.ConfigState{Indent: " ", SortKeys: true, DisableMethods: true, SpewKeys: true}
	return []byte(printer.Sprintf("%#v", cp.Data)), err
}

type response struct {
	Error string          `json:"error"`
	JSON  json.RawMessage `json:"json"`
}

func readResponse(data []byte) any {
	resp := &pluginapi.ContainerAllocateResponse{}
	if err := resp.Unmarshal(data); err != nil {
		return &response{Error: err.Error()}
	}
	text, err := json.Marshal(resp)
	if err != nil {
		panic(err)
	}
	return &response{JSON: text}
}
