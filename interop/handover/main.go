// Command handover tests that devlet and the kubelet's own code take over from
// each other, through the kubelet's state files. Arguments: devlet, a device
// plugin with the flags of generic-device-plugin, and the driver of
// interop/drivers/bindings.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/checkpoint"

	"devlet.test/interop/node"
)

const (
	file     = "kubelet_internal_checkpoint"
	resource = "squat.ai/harmless"
	gone     = "example.com/gone"
	devices  = 8

	// UID of a pod that only the kubelet knows.
	stranger = "7d1c3c62-5b0f-4f7e-9d53-0f6a3b1d2e11"
)

var results node.Results

func main() {
	inDirectory(func(root string) { handOver(os.Args[1], os.Args[2], root) })
	inDirectory(func(root string) { handOverClaims(os.Args[1], os.Args[3], root) })
	results.End()
}

func inDirectory(do func(root string)) {
	root, err := os.MkdirTemp("", "handover")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(root)
	do(root)
}

func handOver(devlet, plugin, root string) {
	n, err := node.Start(devlet, root)
	if !results.Check("devlet starts", err) {
		return
	}
	stopPlugin, err := startPlugin(plugin, filepath.Join(root, "device-plugins"))
	if !results.Check("a plugin starts", err) {
		return
	}
	defer stopPlugin()

	kept, err := n.Admit("kept", resource+"=2")
	results.Check("devlet admits a pod", err)
	dropped, err := n.Admit("dropped", resource+"=1")
	results.Check("devlet admits another pod", err)
	all, err := listed(n)
	if !results.Check("all devices are listed", err) {
		return
	}
	if !results.Check("devlet stops", n.Stop()) {
		return
	}

	kubelet, err := checkpointmanager.NewCheckpointManager(filepath.Join(root, "device-plugins"))
	if err != nil {
		panic(err)
	}
	entries, registered, err := load(kubelet)
	if !results.Check("the kubelet reads the file that devlet left", err) {
		return
	}
	results.Check("the kubelet knows the resource", has(registered, resource))
	results.Check("the kubelet has every allocation of devlet", holds(entries, kept, dropped))

	// The kubelet runs: one pod is removed, one is added, with free devices and some of a plugin that no longer exists.
	free := slices.DeleteFunc(slices.Clone(all), func(id string) bool {
		return slices.Contains(ids(kept), id) || slices.Contains(ids(dropped), id)
	})
	taken := free[:3]
	entries = slices.DeleteFunc(entries, func(e checkpoint.PodDevicesEntry) bool { return e.PodUID == dropped.Pod.UID })
	entries = append(entries,
		entry(resource, checkpoint.DevicesPerNUMA{-1: taken[:1], 1: taken[1:]}),
		entry(gone, checkpoint.DevicesPerNUMA{0: {"gone-0"}}),
	)
	registered[resource], registered[gone] = all, []string{"gone-0", "gone-1"}
	if !results.Check("the kubelet writes its file", kubelet.CreateCheckpoint(file, checkpoint.New(entries, registered))) {
		return
	}

	if n, err = node.Start(devlet, root); !results.Check("devlet starts after the kubelet", err) {
		return
	}
	results.Check("devlet reports the differences", reported(n.Log(), stranger, dropped.Pod.UID))
	results.Check("devlet keeps its own pods until an operator decides", pods(n, kept.Pod.UID, dropped.Pod.UID, stranger))
	if _, err = n.Admit("early", resource+"=1"); err == nil {
		err = errors.New("it is admitted")
	} else if strings.Contains(err.Error(), "devlet import") {
		err = nil
	}
	results.Check("no pod is admitted until an operator decides", err)
	results.Check("the operator imports the kubelet's file", adopt(n, root, file))
	results.Check("devlet has the kubelet's pods", pods(n, kept.Pod.UID, stranger))
	wanted := map[string][]string{kept.Pod.UID: ids(kept), stranger: append([]string{"gone-0"}, taken...)}
	results.Check("devlet knows the holder of each device", holders(n, wanted))
	results.Check("the kubelet's pod has its options", options(n))

	rest := devices - 2 - len(taken)
	err = node.Until(30*time.Second, func() error {
		if r, err := n.Resource(resource); err != nil || r.Free != rest {
			return fmt.Errorf("%d are free, not %d (%v)", r.Free, rest, err)
		}
		return nil
	})
	results.Check("only devices without a holder are free", err)
	filler, err := n.Admit("filler", fmt.Sprintf("%s=%d", resource, rest))
	if err == nil {
		for _, id := range ids(filler) {
			if slices.Contains(taken, id) || slices.Contains(ids(kept), id) {
				err = errors.Join(err, fmt.Errorf("%s is allocated twice", id))
			}
		}
	}
	results.Check("a new pod gets none of the kubelet's devices", err)
	_, err = n.Admit("late", resource+"=1")
	if err == nil {
		err = errors.New("it is admitted")
	} else if strings.Contains(err.Error(), "0 free") {
		err = nil
	}
	results.Check("then there are no free devices left", err)
	results.Check("devlet stops again", n.Stop())

	entries, _, err = load(kubelet)
	results.Check("the kubelet reads the file that devlet left again", err)
	results.Check("the kubelet has its pod and devlet's", holds(entries, kept, filler))
	results.Check("the kubelet's pod is unchanged", untouched(entries,
		entry(resource, checkpoint.DevicesPerNUMA{-1: taken[:1], 1: taken[1:]}),
		entry(gone, checkpoint.DevicesPerNUMA{0: {"gone-0"}}),
	))
}

func startPlugin(binary, directory string) (func(), error) {
	spec := fmt.Sprintf(`{"name":"harmless","groups":[{"count":%d,"paths":[{"path":"/dev/null"}]}]}`, devices)
	cmd := exec.Command(binary, "--listen", "127.0.0.1:0", "--plugin-directory", directory, "--device", spec)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() {
		cmd.Process.Kill()
		cmd.Wait()
	}, nil
}

// load reads the file as a kubelet does.
func load(manager checkpointmanager.CheckpointManager) ([]checkpoint.PodDevicesEntry, map[string][]string, error) {
	cp := checkpoint.New(make([]checkpoint.PodDevicesEntry, 0), make(map[string][]string))
	if err := manager.GetCheckpoint(file, cp); err != nil {
		return nil, nil, err
	}
	entries, registered := cp.GetData()
	return entries, registered, nil
}

func entry(resource string, devices checkpoint.DevicesPerNUMA) checkpoint.PodDevicesEntry {
	response, err := proto.Marshal(&pluginapi.ContainerAllocateResponse{
		Envs:    map[string]string{"FROM_" + strings.ToUpper(resource[:5]): "the kubelet"},
		Devices: []*pluginapi.DeviceSpec{{ContainerPath: "/dev/x", HostPath: "/dev/null", Permissions: "r"}},
	})
	if err != nil {
		panic(err)
	}
	return checkpoint.PodDevicesEntry{
		PodUID: stranger, ContainerName: "app", ResourceName: resource, DeviceIDs: devices, AllocResp: response,
	}
}

func ids(pod node.Pod) []string { return pod.Containers[0].Devices[0].IDs }

func has(registered map[string][]string, resource string) error {
	if _, ok := registered[resource]; !ok {
		return fmt.Errorf("%v lacks %s", registered, resource)
	}
	return nil
}

// holds checks each pod's entry, its devices, and the plugin's answer.
func holds(entries []checkpoint.PodDevicesEntry, pods ...node.Pod) error {
	for _, pod := range pods {
		i := slices.IndexFunc(entries, func(e checkpoint.PodDevicesEntry) bool { return e.PodUID == pod.Pod.UID })
		if i < 0 {
			return fmt.Errorf("pod %s is missing", pod.Pod.Name)
		}
		e := entries[i]
		response := &pluginapi.ContainerAllocateResponse{}
		if err := proto.Unmarshal(e.AllocResp, response); err != nil {
			return err
		}
		if e.ContainerName != "main" || e.ResourceName != resource || !sameSet(e.DeviceIDs.Devices().UnsortedList(), ids(pod)) {
			return fmt.Errorf("pod %s has %+v, not %v", pod.Pod.Name, e, ids(pod))
		}
		if len(response.Devices) == 0 || response.Devices[0].HostPath != "/dev/null" {
			return fmt.Errorf("the answer for pod %s is %v", pod.Pod.Name, response)
		}
	}
	return nil
}

func untouched(entries []checkpoint.PodDevicesEntry, wanted ...checkpoint.PodDevicesEntry) error {
	for _, w := range wanted {
		i := slices.IndexFunc(entries, func(e checkpoint.PodDevicesEntry) bool {
			return e.PodUID == w.PodUID && e.ResourceName == w.ResourceName
		})
		if i < 0 {
			return fmt.Errorf("%s is missing", w.ResourceName)
		}
		if !reflect.DeepEqual(entries[i], w) {
			return fmt.Errorf("it is %+v, not %+v", entries[i], w)
		}
	}
	return nil
}

// listed waits for all devices, and returns their names.
func listed(n *node.Node) ([]string, error) {
	var names []string
	err := node.Until(10*time.Second, func() error {
		all, err := ask(n)
		names = names[:0]
		for _, d := range all {
			names = append(names, d.ID)
		}
		if err == nil && len(names) != devices {
			err = fmt.Errorf("there are %d", len(names))
		}
		return err
	})
	return names, err
}

type device struct {
	Resource, ID string
	Holders      []struct{ UID string }
}

func ask(n *node.Node) ([]device, error) {
	var all struct{ Devices []device }
	err := n.Ask(&all, "get", "devices")
	return all.Devices, err
}

func holders(n *node.Node, wanted map[string][]string) error {
	all, err := ask(n)
	if err != nil {
		return err
	}
	found := map[string][]string{}
	for _, d := range all {
		for _, h := range d.Holders {
			found[h.UID] = append(found[h.UID], d.ID)
		}
	}
	for uid, list := range wanted {
		if !sameSet(found[uid], list) {
			return fmt.Errorf("pod %s holds %v, not %v", uid, found[uid], list)
		}
	}
	if len(found) != len(wanted) {
		return fmt.Errorf("%d pods hold devices, not %d", len(found), len(wanted))
	}
	return nil
}

func pods(n *node.Node, wanted ...string) error {
	var all struct {
		Pods []struct{ UID, Source string }
	}
	if err := n.Ask(&all, "get", "pods"); err != nil {
		return err
	}
	var found []string
	for _, p := range all.Pods {
		found = append(found, p.UID)
		if p.UID == stranger && p.Source != "imported" {
			return fmt.Errorf("the kubelet's pod comes from %q", p.Source)
		}
	}
	if !sameSet(found, wanted) {
		return fmt.Errorf("there are %v, not %v", found, wanted)
	}
	return nil
}

// options checks the run options of the kubelet's pod. Its plugin is not running, and a kubelet's file does not record
// whether it requires PreStartContainer.
func options(n *node.Node) error {
	out, err := n.Run("options", stranger, "app", "--no-start", "--format", "json")
	if err != nil {
		return err
	}
	var got node.Pod
	if err := json.Unmarshal(out, &got); err != nil {
		return err
	}
	want := map[string]string{"FROM_SQUAT": "the kubelet", "FROM_EXAMP": "the kubelet"}
	if len(got.Containers) != 1 || !reflect.DeepEqual(got.Containers[0].Envs, want) {
		return fmt.Errorf("they are %s", out)
	}
	return nil
}

// adopt imports the copy of a file that blocks admissions.
func adopt(n *node.Node, root, name string) error {
	copies, err := filepath.Glob(filepath.Join(root, "devlet", name+".contested-*"))
	if err == nil && len(copies) != 1 {
		err = fmt.Errorf("there are %d copies: %v", len(copies), copies)
	}
	if err == nil {
		_, err = n.Run("import", copies[0])
	}
	return err
}

func reported(log, added, removed string) error {
	for line := range strings.Lines(log) {
		if strings.Contains(line, "ERROR") && strings.Contains(line, "contested") &&
			strings.Contains(line, added) && strings.Contains(line, removed) {
			return nil
		}
	}
	return fmt.Errorf("no error names both %s and %s:\n%s", added, removed, log)
}

func sameSet(a, b []string) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}
