package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	socketCheckPeriod = time.Second
	registerLimit     = 10 * time.Second
)

// fakePlugin serves count devices of one extended resource that stand for no hardware.
//
// Counting is the kubelet's and the scheduler's own: only the devices are made up. Each allocated container sees the ids
// that it was given in BIDIKV_FAKE_<RESOURCE>, so that a test can tell which devices a pod holds.
type fakePlugin struct {
	pluginapi.UnimplementedDevicePluginServer
	resource string
	count    int
	stopped  <-chan struct{}
}

func (p *fakePlugin) socketName() string {
	return "fake-" + strings.NewReplacer("/", "-", ".", "-").Replace(p.resource) + ".sock"
}

func (p *fakePlugin) environmentName() string {
	return "BIDIKV_FAKE_" + strings.ToUpper(strings.NewReplacer("/", "_", ".", "_", "-", "_").Replace(p.resource))
}

func (p *fakePlugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (p *fakePlugin) ListAndWatch(_ *pluginapi.Empty, stream pluginapi.DevicePlugin_ListAndWatchServer) error {
	devices := make([]*pluginapi.Device, p.count)
	for index := range devices {
		devices[index] = &pluginapi.Device{ID: strconv.Itoa(index), Health: pluginapi.Healthy}
	}
	if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: devices}); err != nil {
		return err
	}
	select {
	case <-stream.Context().Done():
	case <-p.stopped:
	}
	return nil
}

func (p *fakePlugin) Allocate(_ context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	response := &pluginapi.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		response.ContainerResponses = append(response.ContainerResponses, &pluginapi.ContainerAllocateResponse{
			Envs: map[string]string{p.environmentName(): strings.Join(container.DevicesIds, ",")},
		})
	}
	return response, nil
}

// serve offers the plugin until the context ends or the kubelet removes its socket, which it does at each start.
func (p *fakePlugin) serve(ctx context.Context, folder string) error {
	path := filepath.Join(folder, p.socketName())
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, p)
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	defer server.Stop()

	if err := p.register(ctx, filepath.Join(folder, filepath.Base(pluginapi.KubeletSocket))); err != nil {
		return err
	}
	klog.InfoS("Registered", "resource", p.resource, "count", p.count)
	ticker := time.NewTicker(socketCheckPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return err
		case <-ticker.C:
			if _, err := os.Stat(path); err != nil {
				return fmt.Errorf("the kubelet removed the socket of %s: it restarted", p.resource)
			}
		}
	}
}

func (p *fakePlugin) register(ctx context.Context, kubeletSocket string) error {
	connection, err := grpc.NewClient("unix://"+kubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(ctx, registerLimit)
	defer cancel()
	_, err = pluginapi.NewRegistrationClient(connection).Register(ctx, &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: p.socketName(), ResourceName: p.resource,
	}, grpc.WaitForReady(true))
	return err
}

// newFakeDevicesCommand is a kubelet device plugin for accelerators and network adapters that this machine lacks.
func newFakeDevicesCommand() *cobra.Command {
	var resources map[string]int
	command := &cobra.Command{
		Use:          "fake-devices",
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(*cobra.Command, []string) error {
			ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer cancel()
			done := make(chan struct{})
			for resource, count := range resources {
				plugin := &fakePlugin{resource: resource, count: count, stopped: ctx.Done()}
				go func() {
					defer func() { done <- struct{}{} }()
					for ctx.Err() == nil {
						if err := plugin.serve(ctx, filepath.Dir(pluginapi.KubeletSocket)); err != nil {
							klog.ErrorS(err, "Registering again", "resource", resource)
							time.Sleep(socketCheckPeriod)
						}
					}
				}()
			}
			for range resources {
				<-done
			}
			return nil
		},
	}
	command.Flags().StringToIntVar(&resources, "resource", nil, "extended resources and their counts, as name=count")
	return command
}
