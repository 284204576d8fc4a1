{{/*
What the operator may do where it serves resources: in the whole cluster, or in each watched namespace.
No wildcard, no Secret, nothing on nodes, namespaces, CRDs or webhooks.
*/}}
{{- define "bidikv.rules" -}}
- apiGroups: [serving.bidikv.io]
  resources: [bidikvinferences]
  verbs: [get, list, watch]
- apiGroups: [serving.bidikv.io]
  resources: [bidikvinferences/status]
  verbs: [patch]
# Children block their owner's deletion in the foreground; the admission plugin OwnerReferencesPermissionEnforcement asks for this.
- apiGroups: [serving.bidikv.io]
  resources: [bidikvinferences/finalizers]
  verbs: [update]
# The children. Server-side apply needs create for what is new and patch for the rest.
- apiGroups: [""]
  resources: [configmaps, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# Why a pod does not start, for the conditions.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
# The router's Role grants this, and nobody may grant what he does not hold.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
