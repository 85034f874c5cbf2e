// Command plugin is a device plugin whose faults are switched by a file. It
// registers again with each new kubelet.sock.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

var (
	dir       = flag.String("dir", api.DevicePluginPath, "the directory of kubelet.sock")
	resource  = flag.String("resource", "example.com/thing", "the resource")
	count     = flag.Int("devices", 4, "the number of devices")
	resources = flag.Int("resources", 0, "serve this number of resources instead, NAME-0 and so on, with the same devices")
	first     = flag.Int("first", 0, "the number of the first device")
	padding   = flag.Int("padding", 0, "length of the device IDs, at least")
	files     = flag.String("files", "", "a directory: the device files are made in it, `script` is read, `calls` written")
	hostFiles = flag.String("host-files", "", "the path of that directory on the host, if it is another one")
	version   = flag.String("version", "v1", "an environment variable of the containers, and a part of the socket's name")
	prestart  = flag.Bool("prestart", false, "require PreStartContainer")
	preferred = flag.Bool("preferred", false, "offer GetPreferredAllocation, which prefers the last devices")
)

// kind is the last part of the resource: thing. It begins the IDs.
func kind() string { return (*resource)[strings.LastIndex(*resource, "/")+1:] }

// variable is the environment variable with a container's device IDs: THING.
func variable() string { return strings.ToUpper(strings.ReplaceAll(kind(), "-", "_")) }

type plugin struct {
	api.UnimplementedDevicePluginServer
	ended <-chan struct{}
}

// fault is a line of the script: the name of a call, then one of these words.
//
//	hang        do not answer before the line is removed, even if the caller gives up
//	refuse      answer with an error
//	slow TIME   answer after this time
//	die         exit
type fault struct{ word, argument string }

func faultOf(call string) fault {
	script, _ := os.ReadFile(filepath.Join(*files, "script"))
	for line := range strings.Lines(string(script)) {
		if words := append(strings.Fields(line), "", ""); words[0] == call {
			return fault{words[1], words[2]}
		}
	}
	return fault{}
}

var writing sync.Mutex

// begin records a call and does its fault.
func begin(call string, ids []string) error {
	line, _ := json.Marshal(map[string]any{
		"call": call, "ids": ids, "version": *version, "time": time.Now(), "pid": os.Getpid(),
	})
	writing.Lock()
	if calls, err := os.OpenFile(filepath.Join(*files, "calls"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err == nil {
		fmt.Fprintf(calls, "%s\n", line)
		calls.Close()
	}
	writing.Unlock()
	switch f := faultOf(call); f.word {
	case "hang":
		for faultOf(call) == f {
			time.Sleep(20 * time.Millisecond)
		}
	case "refuse":
		return status.Error(codes.Internal, "the plugin refuses "+call)
	case "slow":
		duration, _ := time.ParseDuration(f.argument)
		time.Sleep(duration)
	case "die":
		os.Exit(3)
	}
	return nil
}

func options() *api.DevicePluginOptions {
	return &api.DevicePluginOptions{PreStartRequired: *prestart, GetPreferredAllocationAvailable: *preferred}
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return options(), begin("GetDevicePluginOptions", nil)
}

// ListAndWatch sends the devices, and again when the file `unhealthy` changes,
// which has the IDs of the unhealthy ones.
func (p *plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	if err := begin("ListAndWatch", nil); err != nil {
		return err
	}
	last := "-"
	for {
		unhealthy, _ := os.ReadFile(filepath.Join(*files, "unhealthy"))
		if string(unhealthy) != last {
			last = string(unhealthy)
			sick := strings.Fields(last)
			answer := &api.ListAndWatchResponse{}
			for i := range *count {
				device := &api.Device{
					ID: id(i), Health: api.Healthy,
					Topology: &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: 0}}},
				}
				if slices.Contains(sick, device.ID) {
					device.Health = api.Unhealthy
				}
				answer.Devices = append(answer.Devices, device)
			}
			if err := stream.Send(answer); err != nil {
				return err
			}
		}
		select {
		case <-p.ended:
			return nil
		case <-stream.Context().Done():
			return nil
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func id(i int) string {
	name := fmt.Sprintf("%s-%d", kind(), *first+i)
	if missing := *padding - len(name); missing > 0 {
		name += "-" + strings.Repeat("x", missing-1)
	}
	return name
}

func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	answer := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		if err := begin("Allocate", container.DevicesIds); err != nil {
			return nil, err
		}
		ids := slices.Sorted(slices.Values(container.DevicesIds))
		response := &api.ContainerAllocateResponse{Envs: map[string]string{
			variable():              strings.Join(ids, ","),
			variable() + "_VERSION": *version,
		}}
		for _, id := range ids {
			host := *hostFiles
			if host == "" {
				host = *files
			}
			response.Devices = append(response.Devices, &api.DeviceSpec{
				HostPath: filepath.Join(host, id), ContainerPath: "/dev/" + id, Permissions: "rw",
			})
		}
		answer.ContainerResponses = append(answer.ContainerResponses, response)
	}
	return answer, nil
}

func (p *plugin) PreStartContainer(_ context.Context, request *api.PreStartContainerRequest) (*api.PreStartContainerResponse, error) {
	return &api.PreStartContainerResponse{}, begin("PreStartContainer", request.DevicesIds)
}

func (p *plugin) GetPreferredAllocation(_ context.Context, request *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	answer := &api.PreferredAllocationResponse{}
	for _, container := range request.ContainerRequests {
		if err := begin("GetPreferredAllocation", container.AvailableDeviceIDs); err != nil {
			return nil, err
		}
		ids := slices.Sorted(slices.Values(container.AvailableDeviceIDs))
		slices.Reverse(ids)
		answer.ContainerResponses = append(answer.ContainerResponses,
			&api.ContainerPreferredAllocationResponse{DeviceIDs: ids[:container.AllocationSize]})
	}
	return answer, nil
}

// serve registers, and returns when kubelet.sock is another file.
func serve(name string) error {
	endpoint := strings.ReplaceAll(name, "/", "_") + "-" + *version + ".sock"
	kubelet := filepath.Join(*dir, "kubelet.sock")
	registered, err := os.Stat(kubelet)
	if err != nil {
		return err
	}
	socket := filepath.Join(*dir, endpoint)
	os.Remove(socket)
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	ended := make(chan struct{})
	defer close(ended)
	server := grpc.NewServer()
	defer server.Stop()
	api.RegisterDevicePluginServer(server, &plugin{ended: ended})
	go server.Serve(listener)

	client, err := grpc.NewClient("unix:"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	_, err = api.NewRegistrationClient(client).Register(ctx, &api.RegisterRequest{
		Version: api.Version, Endpoint: endpoint, ResourceName: name, Options: options(),
	})
	cancel()
	client.Close()
	if err != nil {
		return err
	}
	log.Print(name, ": registered")
	for {
		now, err := os.Stat(kubelet)
		if err == nil && !(os.SameFile(now, registered) && now.ModTime().Equal(registered.ModTime())) {
			return errors.New("there is a new kubelet.sock")
		}
		if _, err := os.Stat(socket); err != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func main() {
	flag.Parse()
	log.SetFlags(log.Lmicroseconds)
	for i := range *count {
		// Each is /dev/null. Containers have it under the device's name.
		if len(id(i)) > 200 {
			break
		}
		err := unix.Mknod(filepath.Join(*files, id(i)), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3)))
		if err != nil && !errors.Is(err, os.ErrExist) {
			log.Fatal(err)
		}
	}
	for i := range *resources {
		go serveAlways(fmt.Sprintf("%s-%d", *resource, i))
	}
	if *resources > 0 {
		select {}
	}
	serveAlways(*resource)
}

func serveAlways(name string) {
	for {
		log.Print(name, ": ", serve(name))
		time.Sleep(50 * time.Millisecond)
	}
}
