package main

import (
	"fmt"
	"os"
	"path/filepath"

	resourcev1alpha2 "k8s.io/api/resource/v1alpha2"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/checkpoint"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"

	"devlet.test/interop/checkpoints/frame"
)

func raw(text string) runtime.RawExtension { return runtime.RawExtension{Raw: []byte(text)} }

func named(name string) resourcev1alpha2.AllocationResultModel {
	return resourcev1alpha2.AllocationResultModel{
		NamedResources: &resourcev1alpha2.NamedResourcesAllocationResult{Name: name},
	}
}

func claim(n int, handles []resourcev1alpha2.ResourceHandle) state.ClaimInfoState {
	return state.ClaimInfoState{
		DriverName:      "gpu.example.com",
		ClassName:       "gpu-class",
		ClaimUID:        types.UID(fmt.Sprintf("067798be-454e-4be4-9047-0000000000%02d", n)),
		ClaimName:       fmt.Sprintf("claim-%d", n),
		Namespace:       "default",
		PodUIDs:         sets.New("139cdb46-f989-4f17-9561-ca10cfb509a6", "0a9cdb46-f989-4f17-9561-ca10cfb509a6"),
		ResourceHandles: handles,
		CDIDevices:      map[string][]string{"gpu.example.com": {"example.com/gpu=gpu-0", "example.com/gpu=gpu-1"}},
	}
}

// writeSamples writes the files that are kept as test data: DRA claims into
// the first folder, device manager files of the older format into the second.
func writeSamples(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("usage: samples CLAIMS_DIR DEVICES_V1_DIR")
	}
	type handles = []resourcev1alpha2.ResourceHandle
	type handle = resourcev1alpha2.ResourceHandle
	type structured = resourcev1alpha2.StructuredResourceHandle
	type result = resourcev1alpha2.DriverAllocationResult
	one := func(s *structured) handles {
		return handles{{DriverName: "gpu.example.com", StructuredData: s}}
	}
	full := &structured{
		VendorClassParameters: raw(`{"apiVersion":"gpu.example.com/v1","kind":"ClassParameters","sharing":true,"weights":[1,2.5,-3e9],"nested":{"a":null,"b":"x y"}}`),
		VendorClaimParameters: raw(`{"count":2}`),
		NodeName:              "worker-1",
		Results: []result{
			{VendorRequestParameters: raw(`{"memory":"1Gi"}`), AllocationResultModel: named("gpu-0")},
			{AllocationResultModel: named("gpu-1")},
		},
	}
	bare := claim(1, nil)
	bare.PodUIDs, bare.CDIDevices = nil, nil
	blank := claim(1, handles{})
	blank.PodUIDs, blank.CDIDevices = sets.New[string](), map[string][]string{}
	lists := claim(1, handles{})
	lists.CDIDevices = map[string][]string{"b.example.com": nil, "a.example.com": {}, "C.example.com": {"x", ""}}
	odd := claim(1, handles{{DriverName: "d<&>", Data: "a b\n{\"c\":[1]}\u2028\U0001f600\x00"}})
	odd.ClaimName, odd.ClassName = "näme with spaces} {", "<nil>"

	for _, s := range []struct {
		name string
		list state.ClaimInfoStateList
	}{
		{"00-nil-list", nil},
		{"01-nil-handles", state.ClaimInfoStateList{claim(1, nil)}},
		{"02-empty-handles", state.ClaimInfoStateList{claim(1, handles{})}},
		{"03-nil-maps", state.ClaimInfoStateList{bare}},
		{"04-empty-maps", state.ClaimInfoStateList{blank}},
		{"05-cdi-lists", state.ClaimInfoStateList{lists}},
		{"06-zero-handle", state.ClaimInfoStateList{claim(1, handles{{}})}},
		{"07-opaque-handles", state.ClaimInfoStateList{claim(1, handles{
			{DriverName: "gpu.example.com", Data: `{"k":"v w"}`}, {DriverName: "nic.example.com"}, {Data: "only data"},
		})}},
		{"08-odd-strings", state.ClaimInfoStateList{odd}},
		{"20-structured-zero", state.ClaimInfoStateList{claim(1, one(&structured{}))}},
		{"21-structured-node-name", state.ClaimInfoStateList{claim(1, one(&structured{NodeName: "worker-1"}))}},
		{"22-structured-class-parameters", state.ClaimInfoStateList{claim(1, one(&structured{VendorClassParameters: raw(`{"a":1}`)}))}},
		{"23-structured-claim-parameters", state.ClaimInfoStateList{claim(1, one(&structured{VendorClaimParameters: raw(`["x",true,null]`)}))}},
		{"24-structured-scalar-parameters", state.ClaimInfoStateList{claim(1, one(&structured{
			VendorClassParameters: raw(`"text ü"`), VendorClaimParameters: raw(`0`),
		}))}},
		{"25-structured-empty-results", state.ClaimInfoStateList{claim(1, one(&structured{Results: []result{}}))}},
		{"26-structured-zero-result", state.ClaimInfoStateList{claim(1, one(&structured{Results: []result{{}}}))}},
		{"27-structured-named-resources", state.ClaimInfoStateList{claim(1, one(&structured{
			NodeName: "worker-1", Results: []result{{AllocationResultModel: named("gpu-0")}},
		}))}},
		{"28-structured-empty-name", state.ClaimInfoStateList{claim(1, one(&structured{Results: []result{{AllocationResultModel: named("")}}}))}},
		{"29-structured-request-parameters", state.ClaimInfoStateList{claim(1, one(&structured{
			Results: []result{{VendorRequestParameters: raw(`{}`)}, {VendorRequestParameters: raw(`{"z":"\u00fc\n"}`), AllocationResultModel: named("n")}},
		}))}},
		{"30-structured-full", state.ClaimInfoStateList{claim(1, one(full))}},
		{"31-structured-and-data", state.ClaimInfoStateList{claim(1, handles{{DriverName: "gpu.example.com", Data: "both", StructuredData: full}})}},
		{"32-mixed-handles", state.ClaimInfoStateList{claim(1, handles{
			{DriverName: "a.example.com", Data: "opaque"},
			{DriverName: "b.example.com", StructuredData: full},
			{DriverName: "c.example.com", StructuredData: &structured{}},
			{},
		})}},
		{"33-three-claims", state.ClaimInfoStateList{claim(3, one(full)), claim(1, nil), claim(2, handles{})}},
		{"40-same-claim-twice", state.ClaimInfoStateList{claim(1, nil), claim(1, one(full))}},
		{"90-raw-spaces", state.ClaimInfoStateList{claim(1, one(&structured{VendorClassParameters: raw(`{"a": 1}`)}))}},
		{"91-raw-angle-brackets", state.ClaimInfoStateList{claim(1, one(&structured{VendorClassParameters: raw(`{"a":"<&>"}`)}))}},
		{"92-raw-null", state.ClaimInfoStateList{claim(1, one(&structured{VendorClassParameters: raw(`null`)}))}},
	} {
		if err := saveClaims(args[0], s.name, s.list); err != nil {
			return err
		}
	}

	response := func(env string) []byte {
		data, err := (&pluginapi.ContainerAllocateResponse{Envs: map[string]string{"DEV": env}}).Marshal()
		if err != nil {
			panic(err)
		}
		return data
	}
	type entry = checkpoint.PodDevicesEntryV1
	held := func(pod, container, resource string, devices []string, response []byte) entry {
		return entry{PodUID: pod, ContainerName: container, ResourceName: resource, DeviceIDs: devices, AllocResp: response}
	}
	for _, s := range []struct {
		name       string
		entries    []entry
		registered map[string][]string
	}{
		{"00-nil", nil, nil},
		{"01-empty-lists", []entry{}, map[string][]string{}},
		{"02-nil-fields", []entry{{PodUID: "pod"}}, map[string][]string{"vendor.com/gpu": nil}},
		{"03-empty-fields", []entry{{PodUID: "pod", DeviceIDs: []string{}, AllocResp: []byte{}}}, map[string][]string{"vendor.com/gpu": {}}},
		{"04-several", []entry{
			held("pod-1", "main", "vendor.com/gpu", []string{"gpu1", "gpu0"}, response("gpu1,gpu0")),
			held("pod-1", "side", "other.org/nic", []string{"nic0"}, response("nic0")),
			held("pod-2", "main", "vendor.com/gpu", []string{"gpu2"}, nil),
		}, map[string][]string{"vendor.com/gpu": {"gpu2", "gpu1", "gpu0"}, "other.org/nic": {"nic0"}, "Zeta.org/z": {}}},
		{"05-same-entry-twice", []entry{
			held("pod-1", "main", "vendor.com/gpu", []string{"gpu0"}, response("gpu0")),
			held("pod-1", "main", "vendor.com/gpu", []string{"gpu1"}, response("gpu1")),
		}, map[string][]string{}},
		{"06-bad-response", []entry{
			held("pod-1", "main", "vendor.com/gpu", []string{"gpu0"}, []byte{0x0a, 0x7f}),
			held("pod-2", "main", "vendor.com/gpu", []string{"gpu1"}, response("gpu1")),
		}, map[string][]string{}},
		{"07-odd-strings", []entry{
			held("p<&>\u2028", "näme with spaces} {", "<nil>", []string{"a b", "", "]"}, response("x")),
		}, map[string][]string{"": {""}}},
	} {
		manager, err := checkpointmanager.NewCheckpointManager(frame.Dir)
		if err != nil {
			return err
		}
		if err := manager.CreateCheckpoint(devicesFile, checkpoint.NewV1(s.entries, s.registered)); err != nil {
			return err
		}
		data, err := os.ReadFile(filepath.Join(frame.Dir, devicesFile))
		if err != nil {
			return err
		}
		text, err := hashedDevicesV1(data)
		if err != nil {
			return err
		}
		if err := save(args[1], s.name, data, text, manager.GetCheckpoint(devicesFile, newDevicesV1())); err != nil {
			return err
		}
	}
	return nil
}
