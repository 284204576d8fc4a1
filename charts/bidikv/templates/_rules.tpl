{{/*
What the operator may do where it serves resources: in the whole cluster, or in each watched namespace.
No wildcard, no list of Secrets, nothing on nodes, namespaces, CRDs or webhooks. e2e/tests/test_chart_rights.py proves that
all of it is used and that everything else is denied.
*/}}
{{- define "bidikv.rules" -}}
- apiGroups: [serving.bidikv.io]
  resources: [bidikvinferences]
  verbs: [list, watch]
- apiGroups: [serving.bidikv.io]
  resources: [bidikvinferences/status]
  verbs: [patch]
# Children block their owner's deletion in the foreground; the admission plugin OwnerReferencesPermissionEnforcement asks for this.
- apiGroups: [serving.bidikv.io]
  resources: [bidikvinferences/finalizers]
  verbs: [update]
# The children. Server-side apply needs create for what is new and patch for the rest.
- apiGroups: [""]
  resources: [serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Where the cluster serves them and a resource asks for them.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
# The Secret with the peers' token of each resource, by its name. RBAC knows no pattern of names: with watchNamespaces this
# reaches no further than those namespaces.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
# Why a pod does not start, for the conditions; patch: which one a scale-down should spare; delete: one whose peers cannot
# reach it.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
# The router's Role grants this, and nobody may grant what he does not hold.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
