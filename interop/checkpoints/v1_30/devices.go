package main

import (
	"encoding/json"
	"io"
	"strings"

	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager/checksum"
	checkpointerrors "k8s.io/kubernetes/pkg/kubelet/checkpointmanager/errors"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/checkpoint"

	"devlet.test/interop/checkpoints/frame"
)

const devicesFile = "kubelet_internal_checkpoint"

// quiet drops the log lines of the code under test.
func quiet() {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
}

// newDevices and newDevicesV1 return the values that the device manager decodes
// a file into.
func newDevices() *checkpoint.Data {
	return checkpoint.New(make([]checkpoint.PodDevicesEntry, 0), make(map[string][]string)).(*checkpoint.Data)
}

func newDevicesV1() *checkpoint.DataV1 {
	return checkpoint.NewV1(make([]checkpoint.PodDevicesEntryV1, 0), make(map[string][]string)).(*checkpoint.DataV1)
}

// readDevices follows the manager's readCheckpoint: the current format first,
// then the format without NUMA nodes. If both fail it returns the error of the
// first.
func readDevices(data []byte) any {
	frame.Put(devicesFile, data)
	manager, err := checkpointmanager.NewCheckpointManager(frame.Dir)
	if err != nil {
		panic(err)
	}
	v2 := newDevices()
	err = manager.GetCheckpoint(devicesFile, v2)
	a := frame.Devices{
		Error:   frame.Text(err),
		Decoded: err == nil || err == checkpointerrors.ErrCorruptCheckpoint,
	}
	if a.Decoded {
		a.StoredChecksum = uint64(v2.Checksum)
		a.ComputedChecksum = uint64(checksum.New(v2.Data))
		describe(&a, v2)
	}
	if err != nil {
		v1 := newDevicesV1()
		err := manager.GetCheckpoint(devicesFile, v1)
		a.V1Error = frame.Text(err)
		if err == nil || err == checkpointerrors.ErrCorruptCheckpoint {
			sum := sumV1(*v1)
			a.V1ComputedChecksum = &sum
		}
		if err == nil {
			a.V1, a.Error, a.Decoded = true, "", true
			a.StoredChecksum, a.ComputedChecksum = uint64(v1.Checksum), *a.V1ComputedChecksum
			describe(&a, v1)
		}
	}
	a.Restore()
	return &a
}

// sumV1 returns the checksum. Only MarshalCheckpoint computes it, and stores it in
// the value, here a copy.
func sumV1(cp checkpoint.DataV1) uint64 {
	if _, err := cp.MarshalCheckpoint(); err != nil {
		panic(err)
	}
	return uint64(cp.Checksum)
}

func describe(a *frame.Devices, cp checkpoint.DeviceManagerCheckpoint) {
	entries, registered := cp.GetDataInLatestFormat()
	a.Entries, a.EntriesNil = []frame.Entry{}, entries == nil
	a.Registered, a.RegisteredNil = registered, registered == nil
	for _, e := range entries {
		a.Entries = append(a.Entries, frame.Entry{
			PodUID:         e.PodUID,
			ContainerName:  e.ContainerName,
			ResourceName:   e.ResourceName,
			DeviceIDs:      e.DeviceIDs,
			AllocResp:      e.AllocResp,
			AllocRespError: frame.Text((&pluginapi.ContainerAllocateResponse{}).Unmarshal(e.AllocResp)),
		})
	}
	a.Written = frame.Wrote(checkpoint.New(entries, registered).MarshalCheckpoint())
}

func hashedDevices(data []byte) ([]byte, error) {
	cp := newDevices()
	err := cp.UnmarshalCheckpoint(data)
	return []byte(forHash(cp.Data)), err
}

func hashedDevicesV1(data []byte) ([]byte, error) {
	cp := newDevicesV1()
	err := cp.UnmarshalCheckpoint(data)
	return []byte(printV1(cp)), err
}

// printV1 returns the hashed text of the format without NUMA nodes.
func printV1(cp *checkpoint.DataV1) string {
	text := forHash(cp.Data)
	text = strings.Replace(text, "checkpointDataV1", "checkpointData", 1)
	return strings.ReplaceAll(text, "PodDevicesEntryV1", "PodDevicesEntry")
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
