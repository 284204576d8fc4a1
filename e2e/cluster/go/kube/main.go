// Command kube is every Kubernetes program of the local cluster in one binary: one link step instead of nine.
//
// The program is chosen by the name under which it is called (a symbolic link) or by the first argument. Only the chosen
// program's command is constructed: each constructor installs the process's signal handler, and a second one panics.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/restclient"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubeadm "k8s.io/kubernetes/cmd/kubeadm/app"
	kubeadmerrors "k8s.io/kubernetes/cmd/kubeadm/app/util/errors"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// served builds the command of a program that runs until it is told to stop.
func served(build func() *cobra.Command) func() int {
	return func() int { return cli.Run(build()) }
}

func runKubectl() int {
	// kubectl logs while it constructs itself, so its verbosity is read before the flags are parsed.
	if _, err := logs.GlogSetter(kubectl.GetLogVerbosity(os.Args)); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	kubectlutil.CheckErr(cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()))
	return 0
}

func runKubeadm() int {
	kubeadmerrors.HandleError(kubeadm.Run())
	return 0
}

var programs = map[string]func() int{
	"etcd":                    served(newEtcdCommand),
	"fake-devices":            served(newFakeDevicesCommand),
	"kube-apiserver":          served(apiserver.NewAPIServerCommand),
	"kube-controller-manager": served(controllers.NewControllerManagerCommand),
	"kube-proxy":              served(proxy.NewProxyCommand),
	"kube-scheduler":          served(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubeadm":                 runKubeadm,
	"kubectl":                 runKubectl,
	"kubelet":                 served(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
}

func main() {
	name := filepath.Base(os.Args[0])
	run, found := programs[name]
	if !found && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = os.Args[0]
		run, found = programs[name]
	}
	if !found {
		names := make([]string, 0, len(programs))
		for known := range programs {
			names = append(names, known)
		}
		slices.Sort(names)
		fmt.Fprintf(os.Stderr, "kube: no program %q; call one of: %s\n", name, strings.Join(names, ", "))
		os.Exit(2)
	}
	os.Exit(run())
}
