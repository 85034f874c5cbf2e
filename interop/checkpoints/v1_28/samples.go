package main

import (
	"fmt"

	resourcev1alpha2 "k8s.io/api/resource/v1alpha2"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"
)

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

// writeSamples writes the files that are kept as test data.
func writeSamples(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("usage: samples CLAIMS_DIR")
	}
	type handles = []resourcev1alpha2.ResourceHandle
	bare := claim(1, nil)
	bare.PodUIDs, bare.CDIDevices = nil, nil
	blank := claim(1, handles{})
	blank.PodUIDs, blank.CDIDevices = sets.New[string](), map[string][]string{}
	for _, s := range []struct {
		name string
		list state.ClaimInfoStateList
	}{
		{"00-nil-list", nil},
		{"01-nil-handles", state.ClaimInfoStateList{claim(1, nil)}},
		{"02-empty-handles", state.ClaimInfoStateList{claim(1, handles{})}},
		{"03-nil-maps", state.ClaimInfoStateList{bare}},
		{"04-empty-maps", state.ClaimInfoStateList{blank}},
		{"06-zero-handle", state.ClaimInfoStateList{claim(1, handles{{}})}},
		{"07-opaque-handles", state.ClaimInfoStateList{claim(1, handles{
			{DriverName: "gpu.example.com", Data: `{"k":"v w"}`}, {DriverName: "nic.example.com"}, {Data: "only data"},
		})}},
		{"33-three-claims", state.ClaimInfoStateList{claim(3, handles{{Data: "x"}}), claim(1, nil), claim(2, handles{})}},
	} {
		if err := saveClaims(args[0], s.name, s.list); err != nil {
			return err
		}
	}
	return nil
}
