// Command coredns is CoreDNS with the plugins that the local cluster's Corefile names and no others: the full plugin list
// pulls in several cloud SDKs and doubles the build.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/metrics"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/template"
)

func main() {
	// The order in which a query passes the plugins: CoreDNS's own, but for template, which answers what is left over.
	dnsserver.Directives = []string{
		"bind", "ready", "health", "prometheus", "errors", "log", "loadbalance", "cache", "kubernetes", "template",
	}
	coremain.Run()
}
