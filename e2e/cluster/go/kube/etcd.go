package main

import (
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
)

const etcdStartLimit = 30 * time.Second

// newEtcdCommand serves one etcd member without fsync: the cluster's data lives as long as the cluster.
func newEtcdCommand() *cobra.Command {
	var dataDir, clientURL, peerURL string
	command := &cobra.Command{
		Use:           "etcd",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: false,
		RunE: func(*cobra.Command, []string) error {
			client, err := url.Parse(clientURL)
			if err != nil {
				return fmt.Errorf("--client-url: %w", err)
			}
			peer, err := url.Parse(peerURL)
			if err != nil {
				return fmt.Errorf("--peer-url: %w", err)
			}
			config := embed.NewConfig()
			config.Dir = dataDir
			config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{*client}, []url.URL{*client}
			config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{*peer}, []url.URL{*peer}
			config.InitialCluster = config.InitialClusterFromName(config.Name)
			config.AutoCompactionMode, config.AutoCompactionRetention = "periodic", "5m"
			config.UnsafeNoFsync = true
			config.LogLevel = "warn"

			server, err := embed.StartEtcd(config)
			if err != nil {
				return err
			}
			defer server.Close()
			select {
			case <-server.Server.ReadyNotify():
			case err := <-server.Err():
				return err
			case <-time.After(etcdStartLimit):
				return fmt.Errorf("etcd did not become ready within %s", etcdStartLimit)
			}
			stop := make(chan os.Signal, 1)
			signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
			select {
			case <-stop:
				return nil
			case err := <-server.Err():
				return err
			}
		},
	}
	command.Flags().StringVar(&dataDir, "data-dir", "", "folder of the member's data")
	command.Flags().StringVar(&clientURL, "client-url", "http://127.0.0.1:2379", "URL on which clients are served")
	command.Flags().StringVar(&peerURL, "peer-url", "http://127.0.0.1:2380", "URL on which peers would be served")
	if err := command.MarkFlagRequired("data-dir"); err != nil {
		panic(err)
	}
	return command
}
