{{/* Who may connect to which server: the roles that have rights there (docs/security.md). */}}
{{- define "digenrl.servers" -}}
nats: { roles: [scheduler, rollout, encoder, reward, trainer, client] }
redis: { roles: [scheduler, rollout, trainer] }
s3: { roles: [scheduler, rollout, encoder, reward, trainer, client] }
scheduler: { roles: [scheduler, client] }
{{- end }}

{{- define "digenrl.selector" -}}
app.kubernetes.io/name: digenrl
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* A component with a role has the role's rights in the network. */}}
{{- define "digenrl.labels" -}}
{{ include "digenrl.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- with .role }}
digenrl/role: {{ . }}
{{- end }}
{{- end }}

{{- define "digenrl.metadata" -}}
name: {{ .root.Release.Name }}-{{ .component }}
labels: {{- include "digenrl.labels" . | nindent 2 }}
{{- end }}

{{/* Pod Security "restricted". Without service links, the names of Services add no DIGENRL_ variables.
     The first process of a shared namespace reaps processes that others leave. */}}
{{- define "digenrl.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
shareProcessNamespace: true
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "digenrl.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
terminationMessagePolicy: FallbackToLogsOnError
{{- end }}

{{- define "digenrl.http" -}}
ports:
  - { name: http, containerPort: 8000 }
startupProbe: { httpGet: { path: /livez, port: http }, periodSeconds: 5, failureThreshold: 60, timeoutSeconds: 5 }
livenessProbe: { httpGet: { path: /livez, port: http }, periodSeconds: 10, failureThreshold: 6, timeoutSeconds: 5 }
{{- end }}

{{/* Names a recipe, and the cache that is filled for it. */}}
{{- define "digenrl.recipe-digest" -}}
{{ printf "%s %s" .Values.recipe (toJson .Values.recipeFiles) | sha256sum | trunc 8 }}
{{- end }}

{{- define "digenrl.recipe-volume" -}}
- name: recipe
  configMap: { name: {{ .Release.Name }}-recipe }
{{- end }}

{{/* The claim with the models of a pool; empty if it has none. */}}
{{- define "digenrl.claim" -}}
{{- if .pool.claim }}{{ .pool.claim }}{{ else if .root.Values.models.fetch }}{{ .root.Release.Name }}-models-{{ .pool.name }}{{ end }}
{{- end }}

{{- define "digenrl.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
