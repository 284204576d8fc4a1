{{/* Names, labels and image references. */}}

{{- define "bidikv.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Full name of the release's objects: the release's name, with the chart's name unless it holds that already. */}}
{{- define "bidikv.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "bidikv.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "bidikv.selectorLabels" -}}
app.kubernetes.io/name: {{ include "bidikv.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "bidikv.testLabels" -}}
app.kubernetes.io/name: {{ include "bidikv.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end -}}

{{- define "bidikv.labels" -}}
{{ include "bidikv.selectorLabels" . }}
app.kubernetes.io/part-of: bidikv
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "bidikv.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "bidikv.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Reference of an image. Argument: a dict of `image` (a values block) and `chart`. */}}
{{- define "bidikv.image" -}}
{{- if .image.reference -}}
{{- .image.reference -}}
{{- else if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "bidikv.leaseName" -}}
{{- default (include "bidikv.fullname" .) .Values.leaderElection.leaseName -}}
{{- end -}}
